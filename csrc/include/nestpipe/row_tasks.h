// Small helpers of loops over rows: cutting uneven work into tasks, and fetching rows ahead of use.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "nestpipe/parallel.h"
#include "nestpipe/request_line.h"

namespace nestpipe {

// Floats that one task should touch: large against the cost of handing out a task, small against a
// batch.
constexpr std::int64_t kTaskFloats = 1 << 16;

// Rows of `floats_per_row` floats that make up one task.
inline std::int64_t rows_per_task(std::int64_t floats_per_row) {
  return std::max<std::int64_t>(1, kTaskFloats / std::max<std::int64_t>(1, floats_per_row));
}

// Calls body(begin, end) for ranges that together are [0, size), each with about `grain` work.
// work_before(i) is the work of the elements before i: it starts at 0 and strictly ascends. An
// element with much work is a range of its own.
template <typename WorkBefore, typename Body>
void parallel_by_work(std::int64_t size, std::int64_t grain, const WorkBefore& work_before,
                      const Body& body) {
  std::vector<std::int64_t> cuts = {0};
  while (cuts.back() < size) {
    const std::int64_t goal = work_before(cuts.back()) + grain;
    std::int64_t low = cuts.back() + 1;
    std::int64_t high = size;
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      if (work_before(middle) < goal) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    cuts.push_back(low);
  }
  parallel_tasks(static_cast<std::int64_t>(cuts.size()) - 1,
                 [&](std::int64_t task) { body(cuts[task], cuts[task + 1]); });
}

// Asks for the first lines of a row that will be read soon; the hardware's own prefetcher follows
// on long rows.
inline void prefetch_row(const float* row, std::int64_t num_floats) {
  constexpr std::int64_t kFloatsPerLine = 16;
  constexpr std::int64_t kMaxFloats = 8 * kFloatsPerLine;
  const std::int64_t last = std::min(num_floats, kMaxFloats);
  for (std::int64_t d = 0; d < last; d += kFloatsPerLine) request_line(row + d);
}

}  // namespace nestpipe
