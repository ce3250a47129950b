// Parts of a row that a lane moves at a time, `kWidth` floats: 4 with one access of 16 bytes, or 1.
#pragma once

#include <cstdint>

#include "nestpipe/cuda/platform.h"

namespace nestpipe {
namespace cuda {

template <int kWidth>
__device__ __forceinline__ void load_unit(const float* row, std::int64_t unit, float* values) {
  static_assert(kWidth == 1 || kWidth == 4, "16 bytes or 4");
  if constexpr (kWidth == 4) {
    const float4 v = reinterpret_cast<const float4*>(row)[unit];
    values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
  } else {
    values[0] = row[unit];
  }
}

template <int kWidth>
__device__ __forceinline__ void store_unit(float* row, std::int64_t unit, const float* values) {
  if constexpr (kWidth == 4) {
    reinterpret_cast<float4*>(row)[unit] = make_float4(values[0], values[1], values[2], values[3]);
  } else {
    row[unit] = values[0];
  }
}

// Bits of the lanes that have this thread's row: blockDim.x of a warp, from a multiple of it on.
__device__ __forceinline__ unsigned lanes_of_row() {
  const unsigned thread = threadIdx.x + threadIdx.y * blockDim.x;
  const unsigned first = thread % kWarpSize - threadIdx.x;
  return (blockDim.x == kWarpSize ? kAllLanes : (1u << blockDim.x) - 1u) << first;
}

// Lanes that a row needs for a sum in the fixed order: lane and place in its unit are the
// accumulator, kSumLanes in all.
template <int kWidth>
constexpr unsigned kLanesOfSum = 16 / kWidth;

// The accumulators of a row added pairwise (docs/architecture.md, rule 4); all lanes get the sum.
template <int kWidth>
__device__ __forceinline__ float sum_of_lanes(float* sums, unsigned lanes) {
  for (unsigned half = kLanesOfSum<kWidth> / 2; half > 0; half /= 2) {
    for (int k = 0; k < kWidth; ++k) {
      sums[k] += __shfl_xor_sync(lanes, sums[k], static_cast<int>(half));
    }
  }
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  return sums[0];
}

}  // namespace cuda
}  // namespace nestpipe
