// Embeddings of chosen rows into a contiguous matrix, in device memory.
#include "../cuda/row_lanes.cuh"
#include "nestpipe/cuda/rows.h"

namespace nestpipe {
namespace cuda {
namespace {

__device__ __forceinline__ float widen(DataType type, unsigned half) {
  const auto bits = static_cast<std::uint16_t>(half);
  return type == DataType::kBFloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

// The two elements of a word.
__device__ __forceinline__ void widen_word(DataType type, unsigned word, float* values) {
  values[0] = widen(type, word & 0xFFFFu);
  values[1] = widen(type, word >> 16);
}

// One float32 a lane at a time, or one word with two halves.
__global__ void gather_words(GatherRows a, ChosenRows chosen) {
  const std::int64_t j = chosen_position();
  if (j >= a.size) return;
  const std::int64_t row = chosen_row(chosen, j);
  if (row < 0) return;
  const float* from = a.rows + row * a.row_stride;
  float* to = a.out + j * a.out_stride;
  const std::int64_t words = embedding_words(a.data_type, a.dim);
  NESTPIPE_ROLLED
  for (std::int64_t word = threadIdx.x; word < words; word += blockDim.x) {
    if (a.data_type == DataType::kFloat32) {
      to[word] = from[word];
      continue;
    }
    float values[2];
    widen_word(a.data_type, float_bits(from[word]), values);
    to[2 * word] = values[0];
    if (2 * word + 1 < a.dim) to[2 * word + 1] = values[1];
  }
}

// 16 bytes a lane at a time. dim is a multiple of 4, of 8 where elements are halves.
__global__ void gather_vectors(GatherRows a, ChosenRows chosen) {
  const std::int64_t j = chosen_position();
  if (j >= a.size) return;
  const std::int64_t row = chosen_row(chosen, j);
  if (row < 0) return;
  const uint4* from = reinterpret_cast<const uint4*>(a.rows + row * a.row_stride);
  uint4* to = reinterpret_cast<uint4*>(a.out + j * a.out_stride);
  const std::int64_t vectors = embedding_words(a.data_type, a.dim) / kFloatsPerVector;
  NESTPIPE_ROLLED
  for (std::int64_t vector = threadIdx.x; vector < vectors; vector += blockDim.x) {
    const uint4 words = from[vector];
    if (a.data_type == DataType::kFloat32) {
      to[vector] = words;
      continue;
    }
    float v[8];
    widen_word(a.data_type, words.x, v);
    widen_word(a.data_type, words.y, v + 2);
    widen_word(a.data_type, words.z, v + 4);
    widen_word(a.data_type, words.w, v + 6);
    float4* wide = reinterpret_cast<float4*>(to) + 2 * vector;
    wide[0] = make_float4(v[0], v[1], v[2], v[3]);
    wide[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}

}  // namespace

void gather_rows(const GatherRows& a, std::int64_t* bad_position, Stream stream) {
  if (a.size == 0) return;
  const ChosenRows chosen = {a.index, a.size, a.num_rows, bad_position};
  const std::int64_t words = embedding_words(a.data_type, a.dim);
  const int elements = a.data_type == DataType::kFloat32 ? 4 : 8;
  const bool vectors =
      a.dim % elements == 0 && aligned_16(a.rows, a.row_stride) && aligned_16(a.out, a.out_stride);
  const dim3 threads = row_block(vectors ? words / kFloatsPerVector : words);
  launch(vectors ? gather_vectors : gather_words, num_blocks(a.size, threads.y), threads, 0, stream,
         a, chosen);
}

}  // namespace cuda
}  // namespace nestpipe
