// Rows of a message, to shorter elements and back.
#include "nestpipe/wire_rows.h"

#include <cstring>

#include "nestpipe/row_storage.h"
#include "nestpipe/row_tasks.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kBlock = 64;  // Elements converted at a time, in an aligned buffer.

// Calls body(begin, length) for blocks of a row.
template <typename Body>
void for_blocks(std::int64_t dim, const Body& body) {
  for (std::int64_t begin = 0; begin < dim; begin += kBlock) {
    body(begin, dim - begin < kBlock ? dim - begin : kBlock);
  }
}

template <typename Convert>
void encode_halves(const float* row, std::int64_t dim, std::uint8_t* to, const Convert& convert) {
  for_blocks(dim, [&](std::int64_t begin, std::int64_t length) {
    std::uint16_t halves[kBlock];
    for (std::int64_t d = 0; d < length; ++d) halves[d] = convert(row[begin + d]);
    std::memcpy(to + 2 * begin, halves, static_cast<std::size_t>(length) * 2);
  });
}

template <typename Convert>
void decode_halves(const std::uint8_t* from, std::int64_t dim, float* row, const Convert& convert) {
  for_blocks(dim, [&](std::int64_t begin, std::int64_t length) {
    std::uint16_t halves[kBlock];
    std::memcpy(halves, from + 2 * begin, static_cast<std::size_t>(length) * 2);
    for (std::int64_t d = 0; d < length; ++d) row[begin + d] = convert(halves[d]);
  });
}

// Of magnitudes as integers: their order is that of the numbers, then infinity, then NaN.
std::uint32_t largest_magnitude(const float* row, std::int64_t dim) {
  std::int32_t largest = 0;
  for (std::int64_t d = 0; d < dim; ++d) {
    const auto bits = static_cast<std::int32_t>(float_bits(row[d]) & 0x7FFFFFFFu);
    largest = bits > largest ? bits : largest;
  }
  return static_cast<std::uint32_t>(largest);
}

void encode_int8(const float* row, std::int64_t dim, std::uint8_t* to) {
  constexpr std::uint32_t kInfinity = 0x7F800000u;
  constexpr std::uint32_t kNaN = 0x7FC00000u;
  constexpr float kSmallestStep = 0x1p-126f;
  const std::uint32_t largest = largest_magnitude(row, dim);
  if (largest >= kInfinity) {
    std::memcpy(to, &kNaN, 4);
    std::memset(to + 4, 0, static_cast<std::size_t>(dim));
    return;
  }
  float step = bits_float(largest) / 127.0f;
  if (step < kSmallestStep) step = kSmallestStep;
  std::memcpy(to, &step, 4);
  // Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
  constexpr float kMagic = 0x1.8p23f;
  auto* const counts = reinterpret_cast<std::int8_t*>(to + 4);
  for (std::int64_t d = 0; d < dim; ++d) {
    counts[d] = static_cast<std::int8_t>(float_bits(row[d] / step + kMagic) - float_bits(kMagic));
  }
}

void decode_int8(const std::uint8_t* from, std::int64_t dim, float* row) {
  float step;
  std::memcpy(&step, from, 4);
  const auto* const counts = reinterpret_cast<const std::int8_t*>(from + 4);
  for (std::int64_t d = 0; d < dim; ++d) row[d] = static_cast<float>(counts[d]) * step;
}

void encode_row(WireFormat format, const float* row, std::int64_t dim, std::uint8_t* to) {
  switch (format) {
    case WireFormat::kFloat32:
      std::memcpy(to, row, static_cast<std::size_t>(dim) * 4);
      break;
    case WireFormat::kBFloat16:
      encode_halves(row, dim, to, [](float value) { return float_to_bfloat16(value); });
      break;
    case WireFormat::kFloat16:
      encode_halves(row, dim, to, [](float value) { return float_to_float16(value); });
      break;
    case WireFormat::kInt8:
      encode_int8(row, dim, to);
      break;
  }
}

void decode_row(WireFormat format, const std::uint8_t* from, std::int64_t dim, float* row) {
  switch (format) {
    case WireFormat::kFloat32:
      std::memcpy(row, from, static_cast<std::size_t>(dim) * 4);
      break;
    case WireFormat::kBFloat16:
      decode_halves(from, dim, row, [](std::uint16_t half) { return bfloat16_to_float(half); });
      break;
    case WireFormat::kFloat16:
      decode_halves(from, dim, row, [](std::uint16_t half) { return float16_to_float(half); });
      break;
    case WireFormat::kInt8:
      decode_int8(from, dim, row);
      break;
  }
}

}  // namespace

void encode_rows(WireFormat format, const float* rows, std::int64_t num_rows, std::int64_t stride,
                 std::int64_t dim, std::uint8_t* message) {
  const std::int64_t bytes = wire_row_bytes(format, dim);
  parallel_ranges(num_rows, rows_per_task(dim), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t u = begin; u < end; ++u) {
      encode_row(format, rows + u * stride, dim, message + u * bytes);
    }
  });
}

void decode_rows(WireFormat format, const std::uint8_t* message, std::int64_t num_rows,
                 std::int64_t dim, float* rows) {
  const std::int64_t bytes = wire_row_bytes(format, dim);
  parallel_ranges(num_rows, rows_per_task(dim), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t u = begin; u < end; ++u) {
      decode_row(format, message + u * bytes, dim, rows + u * dim);
    }
  });
}

}  // namespace nestpipe
