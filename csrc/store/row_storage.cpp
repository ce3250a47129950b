// Embeddings between float32 and their storage type.
#include "nestpipe/row_storage.h"

namespace nestpipe {
namespace {

// Tells rounding's streams from those of initial values.
constexpr std::uint64_t kRounding = 0xD1B54A32D192ED03ull;

constexpr std::int64_t kBlock = 64;  // Elements converted at a time, in a buffer of half words.

// The kept part of bits after `dropped` low bits (1 to 63) were rounded with the high bits of word.
std::uint64_t round_up_at_random(std::uint64_t bits, int dropped, std::uint64_t word) {
  return (bits + (word >> (64 - dropped))) >> dropped;
}

// Calls body(begin, length, halves) for blocks of the embedding; halves are written to words after.
template <typename Body>
void pack_blocks(std::int64_t dim, float* words, const Body& body) {
  std::uint16_t halves[kBlock];
  for (std::int64_t begin = 0; begin < dim; begin += kBlock) {
    const std::int64_t length = dim - begin < kBlock ? dim - begin : kBlock;
    body(begin, length, halves);
    if (length % 2 != 0) halves[length] = 0;
    std::memcpy(words + begin / 2, halves, static_cast<std::size_t>((length + 1) / 2) * 4);
  }
}

}  // namespace

std::uint64_t rounding_stream(std::uint64_t seed, std::uint64_t table_hash, std::int64_t key,
                              std::int64_t step) {
  return mix64(value_stream(seed ^ kRounding, table_hash, key) + static_cast<std::uint64_t>(step));
}

std::uint16_t float_to_bfloat16(float value, std::uint64_t word) {
  constexpr std::uint16_t kInfinity = 0x7F80;
  const std::uint16_t nearest = float_to_bfloat16(value);
  if ((nearest & 0x7FFF) >= kInfinity) return nearest;
  const std::uint32_t all = float_bits(value);
  std::uint64_t kept = round_up_at_random(all & 0x7FFFFFFFu, 16, word);
  if (kept >= kInfinity) kept = kInfinity - 1;
  return static_cast<std::uint16_t>(kept | (all >> 16 & 0x8000u));
}

std::uint16_t float_to_float16(float value, std::uint64_t word) {
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

void unpack_embedding(DataType type, const float* words, std::int64_t dim, float* values) {
  if (type == DataType::kFloat32) {
    std::memcpy(values, words, static_cast<std::size_t>(dim) * sizeof(float));
    return;
  }
  std::uint16_t halves[kBlock];
  for (std::int64_t begin = 0; begin < dim; begin += kBlock) {
    const std::int64_t length = dim - begin < kBlock ? dim - begin : kBlock;
    std::memcpy(halves, words + begin / 2, static_cast<std::size_t>(length) * 2);
    float* const to = values + begin;
    if (type == DataType::kBFloat16) {
      for (std::int64_t d = 0; d < length; ++d) to[d] = bfloat16_to_float(halves[d]);
    } else {
      for (std::int64_t d = 0; d < length; ++d) to[d] = float16_to_float(halves[d]);
    }
  }
}

void pack_embedding(DataType type, const float* values, std::int64_t dim, float* words) {
  if (type == DataType::kFloat32) {
    std::memcpy(words, values, static_cast<std::size_t>(dim) * sizeof(float));
    return;
  }
  pack_blocks(dim, words, [&](std::int64_t begin, std::int64_t length, std::uint16_t* halves) {
    const float* const from = values + begin;
    if (type == DataType::kBFloat16) {
      for (std::int64_t d = 0; d < length; ++d) halves[d] = float_to_bfloat16(from[d]);
    } else {
      for (std::int64_t d = 0; d < length; ++d) halves[d] = float_to_float16(from[d]);
    }
  });
}

void pack_embedding(DataType type, const float* values, std::int64_t dim, std::uint64_t stream,
                    float* words) {
  if (type == DataType::kFloat32) return pack_embedding(type, values, dim, words);
  pack_blocks(dim, words, [&](std::int64_t begin, std::int64_t length, std::uint16_t* halves) {
    for (std::int64_t d = 0; d < length; ++d) {
      const std::uint64_t word = value_word(stream, begin + d);
      halves[d] = type == DataType::kBFloat16 ? float_to_bfloat16(values[begin + d], word)
                                              : float_to_float16(values[begin + d], word);
    }
  });
}

}  // namespace nestpipe
