// Lookup-and-pool: bags of row numbers become pooled vectors, and gradients of those become
// gradients of rows.
//
// Sums start at +0.0 and follow bag order (forward) or occurrence order in blocks of kGradientBlock
// (backward), so the bits do not depend on the number of threads. docs/architecture.md holds the
// rules, ops/lookup_pool/reference.py the plain version.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace nestpipe {

enum class PoolMode : std::int32_t { kSum = 0, kMean = 1, kMax = 2, kNone = 3 };

// Occurrences of a row whose gradients are summed on their own before block sums are added.
constexpr std::int64_t kGradientBlock = 1024;

// [num_rows, dim] float32; rows may lie further apart than dim, or anywhere.
struct RowMatrix {
  const float* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t stride = 0;
  std::int64_t dim = 0;
  const float* const* pointers = nullptr;  // [num_rows] where each row lies, instead of data
  std::int64_t first = 0;                  // the row that pointers[0] belongs to

  const float* row(std::int64_t slot) const {
    return pointers != nullptr ? pointers[slot - first] : data + slot * stride;
  }
  bool is_null() const { return data == nullptr && pointers == nullptr; }
};

// Which rows form which bag. A segment is a run of bags with one pooling mode and one output or
// gradient matrix.
struct BagList {
  // [num_occurrences] int32 or int64; -1 is padding: skipped and not counted
  const void* slots = nullptr;
  bool slots_are_int64 = false;
  std::int64_t num_occurrences = 0;
  const std::int64_t* bag_offsets = nullptr;  // [num_bags + 1]
  std::int64_t num_bags = 0;
  std::vector<std::int64_t> segment_bags;   // [num_segments + 1]
  std::vector<std::int32_t> segment_modes;  // [num_segments] PoolMode
  const float* weights = nullptr;           // [num_occurrences] or null; only with kSum and kNone

  bool own_rows = false;  // Occurrence j has row j; slots are not read.

  std::int64_t num_segments() const { return static_cast<std::int64_t>(segment_modes.size()); }
};

// One matrix per segment, [bags of the segment, dim]; bags may lie further apart than dim.
struct SegmentOutput {
  float* data;
  std::int64_t stride;
};
struct SegmentGradient {
  const float* data;  // null: gradient 0
  std::int64_t stride;
};

// All of these check the bags first (std::out_of_range for a slot, std::invalid_argument for the
// rest), before writing anything.

// outs[s][b] = pooled rows of bag b of segment s. Writes every element.
void lookup_pool_forward(const RowMatrix& rows, const BagList& bags,
                         const std::vector<SegmentOutput>& outs);

// The same for rows that are found as they are needed: make_rows(begin, end, pointers) says where
// the rows of occurrences begin .. end - 1 lie (null: padding), from several threads; false leaves
// their bags as they are. Slots are not read.
using MakeRows = std::function<bool(std::int64_t, std::int64_t, const float**)>;
void lookup_pool_by_ranges(const BagList& bags, std::int64_t dim,
                           const std::vector<SegmentOutput>& outs, const MakeRows& make_rows);

// accumulator[u] += gradient of row u, for rows that occur. `rows.data` may be null unless a
// segment has kMax. accumulator: [rows.num_rows, rows.dim] contiguous.
void lookup_pool_backward(const RowMatrix& rows, const BagList& bags,
                          const std::vector<SegmentGradient>& grads, float* accumulator);

// Hands over the gradients of all rows, 0 where a row does not occur, a few at a time and from
// several threads: use(begin, end, gradients [end - begin, dim]). Segments with kMax need `rows`.
using UseGradients = std::function<void(std::int64_t, std::int64_t, const float*)>;
void lookup_pool_gradients(const RowMatrix& rows, const BagList& bags,
                           const std::vector<SegmentGradient>& grads, const UseGradients& use);

// No element of a row's gradient has a larger magnitude than this; infinite where something is not
// finite. An upper bound that takes one pass over the bags' gradients.
double lookup_pool_gradient_bound(const BagList& bags, const std::vector<SegmentGradient>& grads,
                                  std::int64_t dim);

// weight_grad[j] = dot(gradient of j's bag, row of j), 0 for padding; only segments with kSum and
// kNone.
void lookup_pool_weight_grad(const RowMatrix& rows, const BagList& bags,
                             const std::vector<SegmentGradient>& grads, float* weight_grad);

}  // namespace nestpipe
