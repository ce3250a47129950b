// Forward: each bag's rows, added (or compared) in bag order.
#include <algorithm>
#include <cstring>

#include "bag_checks.h"
#include "nestpipe/lookup_pool.h"
#include "nestpipe/row_sums.h"
#include "nestpipe/row_tasks.h"

namespace nestpipe {
namespace {

// Rows are fetched this many occurrences before they are added.
constexpr std::int64_t kAhead = 16;

// Slots: a pointer to them, or OwnSlots. A row that is null is padding, too.
template <typename Slots>
struct Forward {
  const RowMatrix& rows;
  Slots slots;
  const float* weights;
  std::int64_t num_occurrences;
  AddRows add_rows;

  // The row of occurrence j, or null for padding.
  const float* row(std::int64_t j) const {
    request(j + kAhead);
    return slots[j] < 0 ? nullptr : rows.row(slots[j]);
  }

  void request(std::int64_t j) const {
    if (j < num_occurrences && slots[j] >= 0) prefetch_row(rows.row(slots[j]), rows.dim);
  }

  // Returns the number of rows added.
  std::int64_t sum(std::int64_t begin, std::int64_t end, float* __restrict out) const {
    const float* sources[kMostRowsAtATime];
    float factors[kMostRowsAtATime];
    const std::int64_t most = rows_at_a_time(rows.dim);
    std::int64_t added = 0;
    std::int64_t count = 0;
    for (std::int64_t j = begin; j < end; ++j) {
      const float* source = row(j);
      if (source == nullptr) continue;
      sources[count] = source;
      if (weights != nullptr) factors[count] = weights[j];
      if (++count < most) continue;
      add_rows(sources, factors, count, rows.dim, added == 0, out);
      added += count;
      count = 0;
    }
    if (count > 0 || added == 0) add_rows(sources, factors, count, rows.dim, added == 0, out);
    return added + count;
  }

  void mean(std::int64_t begin, std::int64_t end, float* __restrict out) const {
    const std::int64_t count = sum(begin, end, out);
    if (count == 0) return;
    const auto divisor = static_cast<float>(count);
    for (std::int64_t d = 0; d < rows.dim; ++d) out[d] /= divisor;
  }

  void max(std::int64_t begin, std::int64_t end, float* __restrict out) const {
    const std::int64_t dim = rows.dim;
    bool is_empty = true;
    for (std::int64_t j = begin; j < end; ++j) {
      const float* __restrict source = row(j);
      if (source == nullptr) continue;
      if (is_empty) {
        std::copy_n(source, dim, out);
        is_empty = false;
      } else {
        for (std::int64_t d = 0; d < dim; ++d) {
          out[d] = beats_maximum(source[d], out[d]) ? source[d] : out[d];
        }
      }
    }
    if (is_empty) std::fill_n(out, dim, 0.0f);
  }

  void single(std::int64_t j, float* __restrict out) const {
    const std::int64_t dim = rows.dim;
    const float* __restrict source = row(j);
    if (source == nullptr) {
      std::fill_n(out, dim, 0.0f);
    } else if (weights == nullptr) {
      std::copy_n(source, dim, out);
    } else {
      const float weight = weights[j];
      for (std::int64_t d = 0; d < dim; ++d) out[d] = weight * source[d];
    }
  }

  void bag(PoolMode mode, std::int64_t begin, std::int64_t end, float* out) const {
    if (mode == PoolMode::kSum) {
      sum(begin, end, out);
    } else if (mode == PoolMode::kMean) {
      mean(begin, end, out);
    } else if (mode == PoolMode::kMax) {
      max(begin, end, out);
    } else {
      single(begin, out);
    }
  }
};

}  // namespace

namespace {

// Pools bags begin .. end - 1.
void pool_bags(const RowMatrix& rows, const BagList& bags, std::int64_t begin, std::int64_t end,
               const std::vector<SegmentOutput>& outs) {
  with_slots(bags, [&](auto slots) {
    const Weighing weighing = bags.weights == nullptr ? Weighing::kPlain : Weighing::kTimes;
    const Forward<decltype(slots)> forward = {rows, slots, bags.weights, bags.bag_offsets[end],
                                              add_rows_function(weighing)};
    for_each_bag(bags, begin, end, [&](std::int64_t segment, std::int64_t bag) {
      const SegmentOutput& out = outs[segment];
      forward.bag(static_cast<PoolMode>(bags.segment_modes[segment]), bags.bag_offsets[bag],
                  bags.bag_offsets[bag + 1],
                  out.data + (bag - bags.segment_bags[segment]) * out.stride);
    });
  });
}

// Calls body(begin, end) for ranges of all bags.
template <typename Body>
void lookup_pool_ranges(const BagList& bags, std::int64_t dim, const Body& body) {
  const auto work_before = [&](std::int64_t bag) { return bags.bag_offsets[bag] + bag; };
  parallel_by_work(bags.num_bags, rows_per_task(dim), work_before, body);
}

}  // namespace

void lookup_pool_forward(const RowMatrix& rows, const BagList& bags,
                         const std::vector<SegmentOutput>& outs) {
  check_bags(bags, rows.num_rows, outs.size());
  lookup_pool_ranges(bags, rows.dim, [&](std::int64_t begin, std::int64_t end) {
    pool_bags(rows, bags, begin, end, outs);
  });
}

void lookup_pool_by_ranges(const BagList& list, std::int64_t dim,
                           const std::vector<SegmentOutput>& outs, const MakeRows& make_rows) {
  BagList bags = list;
  bags.own_rows = true;
  check_bags(bags, bags.num_occurrences, outs.size());
  lookup_pool_ranges(bags, dim, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = bags.bag_offsets[begin];
    std::vector<const float*> pointers(static_cast<std::size_t>(bags.bag_offsets[end] - first));
    if (!make_rows(first, first + static_cast<std::int64_t>(pointers.size()), pointers.data())) {
      return;
    }
    RowMatrix rows;
    rows.num_rows = bags.num_occurrences;
    rows.dim = dim;
    rows.pointers = pointers.data();
    rows.first = first;
    pool_bags(rows, bags, begin, end, outs);
  });
}

}  // namespace nestpipe
