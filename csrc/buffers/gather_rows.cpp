// Embeddings of chosen rows into a contiguous matrix.
#include "nestpipe/gather_rows.h"

#include <cstring>

#include "nestpipe/row_index.h"
#include "nestpipe/row_tasks.h"

namespace nestpipe {

void gather_rows(const GatherRows& a) {
  check_row_index("gather_rows", "index", a.index, a.size, a.num_rows);
  constexpr std::int64_t kAhead = 8;
  const auto copy = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) {
      if (j + kAhead < end) prefetch_row(a.rows + a.index[j + kAhead] * a.row_stride, a.dim);
      std::memcpy(a.out + j * a.out_stride, a.rows + a.index[j] * a.row_stride,
                  static_cast<std::size_t>(a.dim) * sizeof(float));
    }
  };
  parallel_ranges(a.size, rows_per_task(a.dim), copy);
}

}  // namespace nestpipe
