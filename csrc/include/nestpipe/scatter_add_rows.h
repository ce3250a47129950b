// Writes to, adds to, or clears chosen rows of a matrix; each row at most once per call.
#pragma once

#include <cstdint>

namespace nestpipe {

struct ScatterRows {
  float* target = nullptr;  // [num_rows, dim], target_stride apart
  std::int64_t num_rows = 0;
  std::int64_t target_stride = 0;
  std::int64_t dim = 0;
  const std::int64_t* index = nullptr;  // [size], distinct
  std::int64_t size = 0;
  const float* source = nullptr;  // [size, dim], source_stride apart; unused by zero_rows
  std::int64_t source_stride = 0;
};

// target[index[j]] = source[j]
void scatter_rows(const ScatterRows& arguments);
// target[index[j]] += source[j]
void scatter_add_rows(const ScatterRows& arguments);
// target[index[j]] = +0.0
void zero_rows(const ScatterRows& arguments);

}  // namespace nestpipe
