// What every .cu source includes: CUDA, as far as kernels here use it, under nvcc; under another
// compiler (tests only) the emulator of tests/cuda, which has the same names.
//
// Rules that let a source run in both: kernels are started with launch(), never with <<<>>>; shared
// memory is one structure, which shared_memory<T>() gives; accesses that other threads may race
// with go through atomics or the helpers below.
#pragma once

#if defined(__CUDACC__)

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "nestpipe/cuda/runtime.h"

// Before a loop over a row, which a lane runs once or a few times: for sm_100 alone the compiler
// would unroll it, into up to seven times the code.
#define NESTPIPE_ROLLED _Pragma("unroll 1")

namespace nestpipe {
namespace cuda {

// A load that other threads may store to at the same time: not kept in a register, not split.
template <typename T>
__device__ __forceinline__ T load_racing(const T* address) {
  return *const_cast<const volatile T*>(address);
}

template <typename T>
__device__ __forceinline__ void store_racing(T* address, T value) {
  *const_cast<volatile T*>(address) = value;
}

// A load that sees what the thread whose store it reads had stored before a release.
__device__ __forceinline__ int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// atomicCAS that also acquires and releases.
__device__ __forceinline__ int swap_if_equal_release(int* address, int expected, int desired) {
  int before;
  asm volatile("atom.acq_rel.gpu.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(address), "r"(expected), "r"(desired)
               : "memory");
  return before;
}

// The block's shared memory. A kernel uses one type.
template <typename T>
__device__ __forceinline__ T& shared_memory() {
  extern __shared__ __align__(16) unsigned char nestpipe_shared_memory[];
  return *reinterpret_cast<T*>(nestpipe_shared_memory);
}

// Starts a kernel on a stream. Throws std::runtime_error if it could not be started.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, Arguments... arguments) {
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  check_launch();
}

}  // namespace cuda
}  // namespace nestpipe

#else
#include "nestpipe/cuda/emulated.h"
#endif

namespace nestpipe {
namespace cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Bits of the lanes before this one.
__device__ __forceinline__ unsigned lanes_before(unsigned lane) { return (1u << lane) - 1u; }

// Threads of a block where each thread has an item: the one of its number.
constexpr int kThreads = 256;
__device__ __forceinline__ std::int64_t global_thread() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

// Blocks of `per_block` items that cover `size`.
inline unsigned num_blocks(long long size, long long per_block) {
  return static_cast<unsigned>((size + per_block - 1) / per_block);
}

}  // namespace cuda
}  // namespace nestpipe
