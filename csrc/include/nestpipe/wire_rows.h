// Rows as they travel: float32 rows to shorter elements and back.
//
// A row of dim elements takes wire_row_bytes(dim) bytes of the message, elements one after another,
// without padding: so neither the rows nor their elements are aligned. Halves are rounded to
// nearest, ties to even (row_storage.h). int8: the row's step (float32), then dim steps counted.
// step = max(largest magnitude / 127, 2^-126), count = value / step rounded to nearest, ties to
// even; a value comes back as count * step. A row that holds a NaN or an infinity has the step NaN
// and comes back as NaN throughout.
#pragma once

#include <cstdint>

namespace nestpipe {

// Order of nestpipe_kernels.config.WIRE_FORMATS.
enum class WireFormat : std::int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

inline std::int64_t wire_row_bytes(WireFormat format, std::int64_t dim) {
  switch (format) {
    case WireFormat::kFloat32:
      return 4 * dim;
    case WireFormat::kInt8:
      return 4 + dim;
    default:
      return 2 * dim;
  }
}

// rows [num_rows, dim], stride in floats; message [num_rows * wire_row_bytes].
void encode_rows(WireFormat format, const float* rows, std::int64_t num_rows, std::int64_t stride,
                 std::int64_t dim, std::uint8_t* message);
// rows [num_rows, dim], contiguous.
void decode_rows(WireFormat format, const std::uint8_t* message, std::int64_t num_rows,
                 std::int64_t dim, float* rows);

}  // namespace nestpipe
