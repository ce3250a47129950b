// Embeddings between float32 and their storage type.
#include "nestpipe/row_storage.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kBlock = 64;  // Elements converted at a time, in a buffer of half words.

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
