// Rows copied, measured and cleared while they are in cache.
#include "nestpipe/take_rows.h"

#include <algorithm>
#include <cstring>

#include "nestpipe/magnitude.h"
#include "nestpipe/row_index.h"
#include "nestpipe/row_tasks.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kAhead = 4;

std::int32_t largest_magnitude(const float* row, std::int64_t dim) {
  std::int32_t largest = 0;
  for (std::int64_t d = 0; d < dim; ++d) largest = std::max(largest, magnitude(row[d]));
  return largest;
}

}  // namespace

void take_rows(const TakeRows& a) {
  check_distinct_row_index("take_rows", "index", a.index, a.size, a.num_rows);
  parallel_ranges(a.size, rows_per_task(a.dim), [&](std::int64_t begin, std::int64_t end) {
    const std::size_t bytes = static_cast<std::size_t>(a.dim) * sizeof(float);
    for (std::int64_t j = begin; j < end; ++j) {
      if (j + kAhead < end) prefetch_row(a.matrix + a.index[j + kAhead] * a.stride, a.dim);
      float* row = a.matrix + a.index[j] * a.stride;
      const std::int32_t largest = largest_magnitude(row, a.dim);
      std::memcpy(a.peaks + j, &largest, sizeof largest);
      std::memcpy(a.out + j * a.dim, row, bytes);
      std::memset(row, 0, bytes);
    }
  });
}

}  // namespace nestpipe
