// Lookup-and-pool in device memory: bags of row numbers become pooled vectors, and gradients of
// those become gradients of rows and of weights, in the order of additions and so with the bits of
// the CPU's. Nothing synchronizes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nestpipe/cuda/stream.h"
#include "nestpipe/lookup_pool.h"

namespace nestpipe {
namespace cuda {

// A run of bags with one pooling mode and one matrix [bags, dim] of outputs or of gradients.
struct PoolSegment {
  float* matrix;              // null: gradient 0
  std::int64_t stride;        // of its rows
  std::int64_t first_bag;     // ascending over segments
  std::int64_t mode;          // PoolMode
  std::int64_t first_maxima;  // bags of kMax, of the segments before that have a matrix
};

// Everything in device memory. What the CPU's checks of a BagList demand holds, but for slots.
struct PoolBags {
  const void* slots = nullptr;  // [num_occurrences] int32 or int64; -1 is padding
  bool slots_are_int64 = false;
  std::int64_t num_occurrences = 0;           // below 2^31
  const std::int64_t* bag_offsets = nullptr;  // [num_bags + 1]
  std::int64_t num_bags = 0;
  const PoolSegment* segments = nullptr;  // [num_segments]
  std::int64_t num_segments = 0;
  const float* weights = nullptr;  // [num_occurrences] or null
  bool aligned = false;            // all matrices can be accessed 16 bytes at a time
  bool has_means = false;          // some segment has kMean
  std::int64_t num_maxima = 0;     // bags of all segments with kMax that have a matrix
};

// Occurrences whose slot is outside [-1, num_rows) are left out, and the first is left in
// *bad_position (device memory, -1 before), unless that is null. `rows.pointers` is not used.
void lookup_pool_forward(const RowMatrix& rows, const PoolBags& bags, std::int64_t* bad_position,
                         Stream stream);

// Bytes of device memory that lookup_pool_backward needs while it runs.
std::size_t lookup_pool_backward_work_bytes(const PoolBags& bags, std::int64_t num_rows,
                                            std::int64_t dim);
// accumulator[u] += gradient of row u, for rows that occur. rows.data may be null without kMax;
// accumulator: [num_rows, dim] contiguous.
void lookup_pool_backward(const RowMatrix& rows, const PoolBags& bags, void* work,
                          float* accumulator, std::int64_t* bad_position, Stream stream);

// weight_grad[j] = dot(gradient of j's bag, row of j), 0 for padding; only kSum and kNone.
void lookup_pool_weight_grad(const RowMatrix& rows, const PoolBags& bags, float* weight_grad,
                             std::int64_t* bad_position, Stream stream);

}  // namespace cuda
}  // namespace nestpipe
