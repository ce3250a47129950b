// Tells which rows of a gradient matrix hold only finite numbers.
#pragma once

#include <cstdint>

namespace nestpipe {

// finite[u] = 1 if rows[u, 0 .. dim) has neither NaN nor infinity, else 0. rows: [num_rows, dim],
// row_stride apart.
void finite_rows(const float* rows, std::int64_t num_rows, std::int64_t row_stride,
                 std::int64_t dim, std::uint8_t* finite);

// Whether all of them are; writes nothing.
bool all_finite(const float* rows, std::int64_t num_rows, std::int64_t row_stride,
                std::int64_t dim);

}  // namespace nestpipe
