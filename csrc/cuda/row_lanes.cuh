// How kernels that move rows divide them: a few lanes a row, 16 bytes a lane where everything is
// aligned to 16 bytes, 4 otherwise. Blocks take consecutive rows; addresses are int64.
#pragma once

#include <cstdint>

#include "nestpipe/cuda/platform.h"
#include "nestpipe/cuda/stream.h"

namespace nestpipe {
namespace cuda {

constexpr int kRowThreads = 256;
constexpr int kFloatsPerVector = 4;

// Whether rows that begin there, this many floats apart, can be read 16 bytes at a time.
inline bool aligned_16(const void* begin, std::int64_t stride_floats) {
  return reinterpret_cast<std::uintptr_t>(begin) % 16 == 0 && stride_floats % kFloatsPerVector == 0;
}

// Threads of a block as (lanes of a row, rows): the least power of two of lanes, up to a warp, that
// covers `units` (what a lane moves at a time) of a row.
inline dim3 row_block(std::int64_t units) {
  unsigned lanes = 1;
  while (lanes < kWarpSize && lanes < units) lanes *= 2;
  return dim3(lanes, kRowThreads / lanes);
}

// Chosen rows of a matrix: index[j] for j < size, each in [0, num_rows). Without a bad_position
// they have been checked.
struct ChosenRows {
  const std::int64_t* index;
  std::int64_t size, num_rows;
  std::int64_t* bad_position;
};

// The j of this thread's row; at least chosen.size for those without one.
__device__ __forceinline__ std::int64_t chosen_position() {
  return std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
}

// index[j], or -1 where it is out of range, which is noted.
__device__ __forceinline__ std::int64_t chosen_row(const ChosenRows& chosen, std::int64_t j) {
  const std::int64_t row = chosen.index[j];
  if (row >= 0 && row < chosen.num_rows) return row;
  if (threadIdx.x == 0 && chosen.bad_position != nullptr) {  // -1 is the largest unsigned number
    atomicMin(reinterpret_cast<unsigned long long*>(chosen.bad_position),
              static_cast<unsigned long long>(j));
  }
  return -1;
}

}  // namespace cuda
}  // namespace nestpipe
