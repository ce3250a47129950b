// Checks of row indices before anything is written; all throw std::out_of_range or
// std::invalid_argument with the position.
#pragma once

#include <cstdint>

namespace nestpipe {

// Every index[j] must lie in [0, num_rows). `operation` and `name` open the message.
void check_row_index(const char* operation, const char* name, const std::int64_t* index,
                     std::int64_t size, std::int64_t num_rows);

// As above, and no row may occur twice: rows are written by several threads.
void check_distinct_row_index(const char* operation, const char* name, const std::int64_t* index,
                              std::int64_t size, std::int64_t num_rows);

}  // namespace nestpipe
