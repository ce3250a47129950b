// Takes chosen rows out of a matrix, with their largest magnitudes.
#pragma once

#include <cstdint>

namespace nestpipe {

struct TakeRows {
  float* matrix = nullptr;  // [num_rows, dim], stride apart
  std::int64_t num_rows = 0;
  std::int64_t stride = 0;
  std::int64_t dim = 0;
  const std::int64_t* index = nullptr;  // [size], distinct
  std::int64_t size = 0;
  float* out = nullptr;    // [size, dim], contiguous
  float* peaks = nullptr;  // [size]
};

// out[j] = matrix[index[j]]; peaks[j] = its largest magnitude, NaN if it holds one;
// matrix[index[j]] = +0.0. Throws as check_distinct_row_index does, nothing written.
void take_rows(const TakeRows& arguments);

}  // namespace nestpipe
