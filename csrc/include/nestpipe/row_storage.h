// Storage types of embeddings: float32, float16 and bfloat16, and how float32 values become them.
//
// An embedding of dim elements lies in embedding_words(dim) float32 words: the elements one after
// another from the lowest address, a last half word that is over zero. Values are rounded to
// nearest, ties to even, or stochastically: random bits are added below the kept ones, and the sum
// is cut off. The random bits are words of the generator of initial values (init.h) under another
// stream: a function of (seed, table, key, step, element) alone.
#pragma once

#include <cstdint>
#include <cstring>

#include "nestpipe/hash.h"
#include "nestpipe/host_device.h"
#include "nestpipe/init.h"

namespace nestpipe {

// Values of nestpipe_kernels.types.DataType.code.
enum class DataType : std::int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// float32 words that hold an embedding.
NESTPIPE_HOST_DEVICE inline std::int64_t embedding_words(DataType type, std::int64_t dim) {
  return type == DataType::kFloat32 ? dim : (dim + 1) / 2;
}

NESTPIPE_HOST_DEVICE inline std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

NESTPIPE_HOST_DEVICE inline float bits_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

NESTPIPE_HOST_DEVICE inline float bfloat16_to_float(std::uint16_t half) {
  return bits_float(std::uint32_t{half} << 16);
}

// NaN keeps its sign and its leading bits, and is quiet.
NESTPIPE_HOST_DEVICE inline std::uint16_t float_to_bfloat16(float value) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : nearest);
}

NESTPIPE_HOST_DEVICE inline float float16_to_float(std::uint16_t half) {
  constexpr std::uint32_t kRebias = 112u << 23;
  const std::uint32_t shifted = std::uint32_t{half & 0x7FFFu} << 13;
  const std::uint32_t exponent = shifted & (0x1Fu << 23);
  // A subnormal number is an integer times 2^-24: as the mantissa of a number whose last place is
  // that, whose leading one is then taken off. No float32 subnormal occurs on the way.
  const std::uint32_t small =
      float_bits(bits_float(shifted + kRebias + (1u << 23)) - bits_float(113u << 23));
  const std::uint32_t large = shifted + kRebias + (exponent == (0x1Fu << 23) ? kRebias : 0u);
  return bits_float((exponent == 0 ? small : large) | std::uint32_t{half & 0x8000u} << 16);
}

// From 65520 on: infinity. NaN keeps its sign and its leading bits, and is quiet.
NESTPIPE_HOST_DEVICE inline std::uint16_t float_to_float16(float value) {
  constexpr std::uint32_t kMagic = 126u << 23;  // 0.5, whose last place is 2^-24
  const std::uint32_t all = float_bits(value);
  const std::uint32_t bits = all & 0x7FFFFFFFu;
  const std::uint32_t small = float_bits(bits_float(bits) + bits_float(kMagic)) - kMagic;
  const std::uint32_t normal = (bits - (112u << 23) + 0xFFFu + ((bits >> 13) & 1u)) >> 13;
  const std::uint32_t special = bits > 0x7F800000u ? 0x7E00u | (bits >> 13 & 0x3FFu) : 0x7C00u;
  const std::uint32_t finite = bits < (113u << 23) ? small : normal;
  return static_cast<std::uint16_t>((bits >= (143u << 23) ? special : finite) |
                                    (all >> 16 & 0x8000u));
}

// The element's stream of random words: word e belongs to element e. The seed is changed, so that
// these are not the words of initial values.
NESTPIPE_HOST_DEVICE inline std::uint64_t rounding_stream(std::uint64_t seed,
                                                          std::uint64_t table_hash,
                                                          std::int64_t key, std::int64_t step) {
  constexpr std::uint64_t kRounding = 0xD1B54A32D192ED03ull;
  return mix64(value_stream(seed ^ kRounding, table_hash, key) + static_cast<std::uint64_t>(step));
}

// The kept part of bits after `dropped` low bits (1 to 63) were rounded with the high bits of word.
NESTPIPE_HOST_DEVICE inline std::uint64_t round_up_at_random(std::uint64_t bits, int dropped,
                                                             std::uint64_t word) {
  return (bits + (word >> (64 - dropped))) >> dropped;
}

// Stochastic rounding with the high bits of `word`. NaN and infinities, and values that rounding
// to nearest makes infinite, become what that makes of them; no other value becomes infinite.
NESTPIPE_HOST_DEVICE inline std::uint16_t float_to_bfloat16(float value, std::uint64_t word) {
  constexpr std::uint16_t kInfinity = 0x7F80;
  const std::uint16_t nearest = float_to_bfloat16(value);
  if ((nearest & 0x7FFF) >= kInfinity) return nearest;
  const std::uint32_t all = float_bits(value);
  std::uint64_t kept = round_up_at_random(all & 0x7FFFFFFFu, 16, word);
  if (kept >= kInfinity) kept = kInfinity - 1;
  return static_cast<std::uint16_t>(kept | (all >> 16 & 0x8000u));
}

NESTPIPE_HOST_DEVICE inline std::uint16_t float_to_float16(float value, std::uint64_t word) {
  constexpr std::uint16_t kInfinity = 0x7C00;
  const std::uint16_t nearest = float_to_float16(value);
  if ((nearest & 0x7FFF) >= kInfinity) return nearest;
  const std::uint32_t all = float_bits(value);
  const std::uint32_t bits = all & 0x7FFFFFFFu;
  std::uint64_t kept;
  if (bits >= (113u << 23)) {
    kept = round_up_at_random(bits - (112u << 23), 13, word);
    if (kept >= kInfinity) kept = kInfinity - 1;
  } else {
    // Below 2^-14 the last place is 2^-24: more bits of the mantissa are dropped. Values below
    // 2^-64 would round up with a chance below 2^-40; they become zero.
    const int exponent = bits >> 23 == 0 ? 1 : static_cast<int>(bits >> 23);
    const std::uint64_t mantissa = (bits & 0x7FFFFFu) | (bits >> 23 == 0 ? 0u : 1u << 23);
    const int dropped = 126 - exponent;
    kept = dropped < 64 ? round_up_at_random(mantissa, dropped, word) : 0;
  }
  return static_cast<std::uint16_t>(kept | (all >> 16 & 0x8000u));
}

// What the random bits of rows depend on beside the elements. keys null: round to nearest.
struct RandomRounding {
  const std::int64_t* keys = nullptr;           // [num_rows]
  const std::int32_t* tables = nullptr;         // [num_rows], in [0, number of tables)
  const std::uint64_t* table_hashes = nullptr;  // [number of tables]
  const std::uint64_t* table_seeds = nullptr;   // [number of tables]
  std::int64_t step = 0;

  NESTPIPE_HOST_DEVICE std::uint64_t stream(std::int64_t row) const {
    const std::int32_t table = tables[row];
    return rounding_stream(table_seeds[table], table_hashes[table], keys[row], step);
  }
};

// words [embedding_words] -> values [dim], exactly.
void unpack_embedding(DataType type, const float* words, std::int64_t dim, float* values);
// values [dim] -> words [embedding_words], to nearest.
void pack_embedding(DataType type, const float* values, std::int64_t dim, float* words);
// The same, stochastically.
void pack_embedding(DataType type, const float* values, std::int64_t dim, std::uint64_t stream,
                    float* words);

}  // namespace nestpipe
