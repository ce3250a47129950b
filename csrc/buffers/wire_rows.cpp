// Rows of a message, to shorter elements and back.
#include "nestpipe/wire_rows.h"

#include <cstring>

#include "nestpipe/row_storage.h"
#include "nestpipe/row_tasks.h"

// The loops are compiled twice, plainly and for AVX2 with half-precision conversions; the machine
// decides. Both give the same bits: nothing is fused, and the conversions round and keep NaNs
// alike.
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define NESTPIPE_WIRE_AVX2 __attribute__((target("avx2,f16c")))
#endif
#define NESTPIPE_WIRE_INLINE inline __attribute__((always_inline))

namespace nestpipe {
namespace {

constexpr std::int64_t kBlock = 64;  // Elements converted at a time, in an aligned buffer.

// Calls body(begin, length) for blocks of a row.
template <typename Body>
NESTPIPE_WIRE_INLINE void for_blocks(std::int64_t dim, const Body& body) {
  for (std::int64_t begin = 0; begin < dim; begin += kBlock) {
    body(begin, dim - begin < kBlock ? dim - begin : kBlock);
  }
}

template <typename Convert>
NESTPIPE_WIRE_INLINE void encode_halves(const float* row, std::int64_t dim, std::uint8_t* to,
                                        const Convert& convert) {
  for_blocks(dim, [&](std::int64_t begin, std::int64_t length) {
    std::uint16_t halves[kBlock];
    for (std::int64_t d = 0; d < length; ++d) halves[d] = convert(row[begin + d]);
    std::memcpy(to + 2 * begin, halves, static_cast<std::size_t>(length) * 2);
  });
}

template <typename Convert>
NESTPIPE_WIRE_INLINE void decode_halves(const std::uint8_t* from, std::int64_t dim, float* row,
                                        const Convert& convert) {
  for_blocks(dim, [&](std::int64_t begin, std::int64_t length) {
    std::uint16_t halves[kBlock];
    std::memcpy(halves, from + 2 * begin, static_cast<std::size_t>(length) * 2);
    for (std::int64_t d = 0; d < length; ++d) row[begin + d] = convert(halves[d]);
  });
}

// Of magnitudes as integers: their order is that of the numbers, then infinity, then NaN.
NESTPIPE_WIRE_INLINE std::uint32_t largest_magnitude(const float* row, std::int64_t dim) {
  std::int32_t largest = 0;
  for (std::int64_t d = 0; d < dim; ++d) {
    const auto bits = static_cast<std::int32_t>(float_bits(row[d]) & 0x7FFFFFFFu);
    largest = bits > largest ? bits : largest;
  }
  return static_cast<std::uint32_t>(largest);
}

NESTPIPE_WIRE_INLINE void encode_int8(const float* row, std::int64_t dim, std::uint8_t* to) {
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

NESTPIPE_WIRE_INLINE void decode_int8(const std::uint8_t* from, std::int64_t dim, float* row) {
  float step;
  std::memcpy(&step, from, 4);
  const auto* const counts = reinterpret_cast<const std::int8_t*>(from + 4);
  for (std::int64_t d = 0; d < dim; ++d) row[d] = static_cast<float>(counts[d]) * step;
}

NESTPIPE_WIRE_INLINE void encode_row(WireFormat format, const float* row, std::int64_t dim,
                                     std::uint8_t* to) {
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

NESTPIPE_WIRE_INLINE void decode_row(WireFormat format, const std::uint8_t* from, std::int64_t dim,
                                     float* row) {
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

struct Rows {
  WireFormat format;
  std::int64_t dim;
  std::int64_t bytes;   // Of a row in the message.
  std::int64_t stride;  // Of the rows, in floats.
};

NESTPIPE_WIRE_INLINE void encode_range(const Rows& a, std::int64_t count, const float* rows,
                                       std::uint8_t* message) {
  for (std::int64_t u = 0; u < count; ++u) {
    encode_row(a.format, rows + u * a.stride, a.dim, message + u * a.bytes);
  }
}

NESTPIPE_WIRE_INLINE void decode_range(const Rows& a, std::int64_t count,
                                       const std::uint8_t* message, float* rows) {
  for (std::int64_t u = 0; u < count; ++u) {
    decode_row(a.format, message + u * a.bytes, a.dim, rows + u * a.stride);
  }
}

void encode_plainly(const Rows& a, std::int64_t count, const float* rows, std::uint8_t* message) {
  encode_range(a, count, rows, message);
}

void decode_plainly(const Rows& a, std::int64_t count, const std::uint8_t* message, float* rows) {
  decode_range(a, count, message, rows);
}

#ifdef NESTPIPE_WIRE_AVX2
NESTPIPE_WIRE_AVX2 void encode_float16_row(const float* row, std::int64_t dim, std::uint8_t* to) {
  std::int64_t d = 0;
  for (; d + 8 <= dim; d += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(row + d), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * d), halves);
  }
  encode_halves(row + d, dim - d, to + 2 * d, [](float value) { return float_to_float16(value); });
}

NESTPIPE_WIRE_AVX2 void encode_with_avx2(const Rows& a, std::int64_t count, const float* rows,
                                         std::uint8_t* message) {
  if (a.format != WireFormat::kFloat16) return encode_range(a, count, rows, message);
  for (std::int64_t u = 0; u < count; ++u) {
    encode_float16_row(rows + u * a.stride, a.dim, message + u * a.bytes);
  }
}

NESTPIPE_WIRE_AVX2 void decode_with_avx2(const Rows& a, std::int64_t count,
                                         const std::uint8_t* message, float* rows) {
  decode_range(a, count, message, rows);
}

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");  // All of these have f16c, too.
  return has;
}
#else
constexpr bool has_avx2() { return false; }
constexpr auto encode_with_avx2 = encode_plainly;
constexpr auto decode_with_avx2 = decode_plainly;
#endif

}  // namespace

void encode_rows(WireFormat format, const float* rows, std::int64_t num_rows, std::int64_t stride,
                 std::int64_t dim, std::uint8_t* message) {
  const Rows a = {format, dim, wire_row_bytes(format, dim), stride};
  const auto encode = has_avx2() ? encode_with_avx2 : encode_plainly;
  parallel_ranges(num_rows, rows_per_task(dim), [&](std::int64_t begin, std::int64_t end) {
    encode(a, end - begin, rows + begin * stride, message + begin * a.bytes);
  });
}

void decode_rows(WireFormat format, const std::uint8_t* message, std::int64_t num_rows,
                 std::int64_t dim, float* rows) {
  const Rows a = {format, dim, wire_row_bytes(format, dim), dim};
  const auto decode = has_avx2() ? decode_with_avx2 : decode_plainly;
  parallel_ranges(num_rows, rows_per_task(dim), [&](std::int64_t begin, std::int64_t end) {
    decode(a, end - begin, message + begin * a.bytes, rows + begin * dim);
  });
}

}  // namespace nestpipe
