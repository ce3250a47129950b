// Writing to, adding to and clearing chosen rows.
#include "nestpipe/scatter_add_rows.h"

#include <cstring>

#include "nestpipe/row_index.h"
#include "nestpipe/row_tasks.h"

namespace nestpipe {
namespace {

// Checks the index, then calls apply(target row, j) for each j, fetching target rows ahead.
template <typename Apply>
void for_each_target(const char* operation, const ScatterRows& a, const Apply& apply) {
  check_distinct_row_index(operation, "index", a.index, a.size, a.num_rows);
  constexpr std::int64_t kAhead = 8;
  parallel_ranges(a.size, rows_per_task(a.dim), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) {
      if (j + kAhead < end) {
        prefetch_row(a.target + a.index[j + kAhead] * a.target_stride, a.dim);
      }
      apply(a.target + a.index[j] * a.target_stride, j);
    }
  });
}

}  // namespace

void scatter_rows(const ScatterRows& a) {
  for_each_target("scatter_rows", a, [&a](float* target, std::int64_t j) {
    std::memcpy(target, a.source + j * a.source_stride,
                static_cast<std::size_t>(a.dim) * sizeof(float));
  });
}

void scatter_add_rows(const ScatterRows& a) {
  for_each_target("scatter_add_rows", a, [&a](float* __restrict target, std::int64_t j) {
    const float* __restrict source = a.source + j * a.source_stride;
    for (std::int64_t d = 0; d < a.dim; ++d) target[d] += source[d];
  });
}

void zero_rows(const ScatterRows& a) {
  for_each_target("zero_rows", a, [&a](float* target, std::int64_t) {
    std::memset(target, 0, static_cast<std::size_t>(a.dim) * sizeof(float));
  });
}

}  // namespace nestpipe
