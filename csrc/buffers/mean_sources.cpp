// Row gradients summed over sources in one pass: every entry is read once, every row written once.
#include "nestpipe/mean_sources.h"

#include <algorithm>

#include "nestpipe/magnitude.h"
#include "nestpipe/row_index.h"
#include "nestpipe/row_tasks.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kAhead = 4;

// Adds value / divisor; true if each was at most `limit`. A sum starts at +0.0, as -0.0 would stay.
template <bool kFirst, bool kDivide>
bool add_entry(const float* __restrict entry, float divisor, std::int64_t dim,
               float* __restrict sum, std::int32_t limit) {
  std::int32_t largest = 0;
  for (std::int64_t d = 0; d < dim; ++d) {
    const float value = kDivide ? entry[d] / divisor : entry[d];
    largest = std::max(largest, magnitude(value));
    sum[d] = (kFirst ? 0.0f : sum[d]) + value;
  }
  return largest <= limit;
}

bool add_entry(bool first, const float* entry, float divisor, std::int64_t dim, float* sum,
               std::int32_t limit) {
  if (divisor == 1.0f) {
    return first ? add_entry<true, false>(entry, divisor, dim, sum, limit)
                 : add_entry<false, false>(entry, divisor, dim, sum, limit);
  }
  return first ? add_entry<true, true>(entry, divisor, dim, sum, limit)
               : add_entry<false, true>(entry, divisor, dim, sum, limit);
}

void mean_row(const MeanSources& a, std::int64_t row, std::int32_t limit) {
  float* sum = a.total + row * a.dim;
  const std::int64_t begin = a.starts[row];
  const std::int64_t end = a.starts[row + 1];
  if (begin == end) std::fill_n(sum, a.dim, 0.0f);
  bool good = true;
  std::int64_t source = 0;
  for (std::int64_t k = begin; k < end; ++k) {
    const std::int64_t entry = a.order[k];
    while (entry >= a.source_ends[source]) ++source;
    good &= add_entry(k == begin, a.boxes + entry * a.dim, a.divisors[source], a.dim, sum, limit);
  }
  if (!good) a.countable[row] = 0;
  if (a.num_sources == 1) return;
  const float sources = static_cast<float>(a.num_sources);
  for (std::int64_t d = 0; d < a.dim; ++d) sum[d] /= sources;
}

}  // namespace

void entries_by_row(const std::int64_t* slot, std::int64_t size, std::int64_t num_rows,
                    std::int64_t* starts, std::int64_t* order) {
  check_row_index("entries_by_row", "slot", slot, size, num_rows);
  std::fill_n(starts, num_rows + 1, 0);
  for (std::int64_t m = 0; m < size; ++m) ++starts[slot[m] + 1];
  for (std::int64_t u = 0; u < num_rows; ++u) starts[u + 1] += starts[u];
  for (std::int64_t m = 0; m < size; ++m) order[starts[slot[m]]++] = m;
  // Each start has moved to its row's end, which is the next row's start.
  std::copy_backward(starts, starts + num_rows, starts + num_rows + 1);
  starts[0] = 0;
}

void mean_sources(const MeanSources& a) {
  if (a.rows != nullptr) {
    check_distinct_row_index("mean_sources", "rows", a.rows, a.num_chosen, a.num_rows);
  }
  const std::int32_t limit = magnitude(a.limit);
  const std::int64_t size = a.rows != nullptr ? a.num_chosen : a.num_rows;
  parallel_ranges(size, rows_per_task(2 * a.dim), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) {
      if (j + kAhead < end) {
        const std::int64_t next = a.rows != nullptr ? a.rows[j + kAhead] : j + kAhead;
        for (std::int64_t k = a.starts[next]; k < a.starts[next + 1]; ++k) {
          prefetch_row(a.boxes + a.order[k] * a.dim, a.dim);
        }
      }
      mean_row(a, a.rows != nullptr ? a.rows[j] : j, limit);
    }
  });
}

}  // namespace nestpipe
