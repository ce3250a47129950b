// Embeddings of chosen rows into a contiguous matrix.
#include "nestpipe/gather_rows.h"

#include "nestpipe/row_index.h"
#include "nestpipe/row_tasks.h"

namespace nestpipe {

void gather_rows(const GatherRows& a) {
  check_row_index("gather_rows", "index", a.index, a.size, a.num_rows);
  constexpr std::int64_t kAhead = 8;
  const std::int64_t words = embedding_words(a.data_type, a.dim);
  const auto copy = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) {
      if (j + kAhead < end) prefetch_row(a.rows + a.index[j + kAhead] * a.row_stride, words);
      unpack_embedding(a.data_type, a.rows + a.index[j] * a.row_stride, a.dim,
                       a.out + j * a.out_stride);
    }
  };
  parallel_ranges(a.size, rows_per_task(a.dim), copy);
}

}  // namespace nestpipe
