// Copies the embeddings of chosen rows into a contiguous matrix (what travels to other ranks).
#pragma once

#include <cstdint>

#include "nestpipe/row_storage.h"

namespace nestpipe {

// out[j, :] = the embedding of rows[index[j], :], widened to float32. rows: [num_rows, >=
// embedding_words], row_stride apart; out: [size, dim], out_stride apart.
struct GatherRows {
  const float* rows = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t row_stride = 0;
  std::int64_t dim = 0;
  const std::int64_t* index = nullptr;  // [size], repeats allowed
  std::int64_t size = 0;
  float* out = nullptr;
  std::int64_t out_stride = 0;
  DataType data_type = DataType::kFloat32;
};

void gather_rows(const GatherRows& arguments);

}  // namespace nestpipe
