// Finite means: the exponent bits are not all ones.
#include "nestpipe/finite_rows.h"

#include <atomic>
#include <cstring>

#include "nestpipe/row_tasks.h"

namespace nestpipe {
namespace {

bool is_finite_row(const float* row, std::int64_t dim) {
  constexpr std::uint32_t kExponent = 0x7F800000u;
  std::uint32_t bad = 0;
  for (std::int64_t d = 0; d < dim; ++d) {
    std::uint32_t bits;
    std::memcpy(&bits, row + d, sizeof bits);
    bad |= static_cast<std::uint32_t>((bits & kExponent) == kExponent);
  }
  return bad == 0;
}

}  // namespace

void finite_rows(const float* rows, std::int64_t num_rows, std::int64_t row_stride,
                 std::int64_t dim, std::uint8_t* finite) {
  parallel_ranges(num_rows, rows_per_task(dim), [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t u = begin; u < end; ++u)
      finite[u] = is_finite_row(rows + u * row_stride, dim);
  });
}

bool all_finite(const float* rows, std::int64_t num_rows, std::int64_t row_stride,
                std::int64_t dim) {
  std::atomic<bool> all{true};
  parallel_ranges(num_rows, rows_per_task(dim), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t u = begin; u < end && all.load(std::memory_order_relaxed); ++u) {
      if (!is_finite_row(rows + u * row_stride, dim)) all.store(false, std::memory_order_relaxed);
    }
  });
  return all.load();
}

}  // namespace nestpipe
