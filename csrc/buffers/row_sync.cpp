// Whole-row copies between batch buffers.
#include "nestpipe/row_sync.h"

#include <cstring>

#include "nestpipe/row_index.h"
#include "nestpipe/row_tasks.h"

namespace nestpipe {

void row_sync(const RowSync& a) {
  check_row_index("row_sync", "source_index", a.source_index, a.size, a.source_rows);
  check_distinct_row_index("row_sync", "target_index", a.target_index, a.size, a.target_rows);
  constexpr std::int64_t kAhead = 4;
  const auto copy = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) {
      if (j + kAhead < end) {
        prefetch_row(a.source + a.source_index[j + kAhead] * a.row_floats, a.row_floats);
      }
      std::memcpy(a.target + a.target_index[j] * a.row_floats,
                  a.source + a.source_index[j] * a.row_floats,
                  static_cast<std::size_t>(a.row_floats) * sizeof(float));
    }
  };
  parallel_ranges(a.size, rows_per_task(a.row_floats), copy);
}

}  // namespace nestpipe
