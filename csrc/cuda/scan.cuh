// Exclusive sums: over the threads of a block, and over an array in device memory.
#pragma once

#include <cstdint>

#include "nestpipe/cuda/platform.h"
#include "nestpipe/cuda/stream.h"

namespace nestpipe {
namespace cuda {

constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / kWarpSize;
constexpr int kScanItems = 8;  // a thread's
constexpr int kScanTile = kScanThreads * kScanItems;

struct ScanShared {
  int warp_sums[kScanWarps];
};

// The sum of the values of the threads before this one; *total: of all of them. Every thread of a
// block of kScanThreads takes part.
__device__ __forceinline__ int block_exclusive_sum(int value, ScanShared& shared, int* total) {
  const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int up_to_here = value;
  for (unsigned distance = 1; distance < kWarpSize; distance *= 2) {
    const int before = __shfl_up_sync(kAllLanes, up_to_here, distance);
    if (lane >= distance) up_to_here += before;
  }
  if (lane == kWarpSize - 1) store_racing(&shared.warp_sums[warp], up_to_here);
  __syncthreads();
  int before_warp = 0, all = 0;
  for (unsigned other = 0; other < kScanWarps; ++other) {
    const int sum = load_racing(&shared.warp_sums[other]);
    if (other < warp) before_warp += sum;
    all += sum;
  }
  __syncthreads();  // the next call writes warp_sums
  *total = all;
  return before_warp + up_to_here - value;
}

// The first of the items that this thread has where a block has a tile.
__device__ __forceinline__ std::int64_t first_item() {
  return std::int64_t{blockIdx.x} * kScanTile + std::int64_t{threadIdx.x} * kScanItems;
}

// Scratch of exclusive_sum: one sum per tile.
inline std::int64_t scan_work_items(std::int64_t size) {
  return (size + kScanTile - 1) / kScanTile;
}

// values[i] becomes the sum of the values before i; *total the sum of all of them, which must be
// below 2^31. work: [scan_work_items(size)]. All in device memory.
void exclusive_sum(std::int32_t* values, std::int64_t size, std::int32_t* work, std::int64_t* total,
                   Stream stream);

}  // namespace cuda
}  // namespace nestpipe
