// Copies whole rows between the two batch buffers: the rows that consecutive batches share.
#pragma once

#include <cstdint>

namespace nestpipe {

struct RowSync {
  const float* source = nullptr;  // [source_rows, row_floats]
  std::int64_t source_rows = 0;
  float* target = nullptr;  // [target_rows, row_floats], another buffer
  std::int64_t target_rows = 0;
  std::int64_t row_floats = 0;
  const std::int64_t* source_index = nullptr;  // [size]
  const std::int64_t* target_index = nullptr;  // [size], distinct
  std::int64_t size = 0;
};

// target[target_index[j]] = source[source_index[j]]. Checks all indices before the first write.
void row_sync(const RowSync& arguments);

}  // namespace nestpipe
