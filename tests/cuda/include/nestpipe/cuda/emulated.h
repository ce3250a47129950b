// CUDA on the CPU, for tests: what `nestpipe/cuda/platform.h` gives to a .cu source that is not
// compiled by nvcc. Kernels run as they are; every CUDA thread is a fiber, and all fibers of a
// launch share one thread of the machine.
//
// Which fiber runs next is drawn at random from a seed. A fiber can be put aside wherever another
// thread of a GPU could come between: at barriers and warp operations, at atomics, and at the
// helpers for accesses that race. So a kernel whose result depends on luck gives different results
// under different seeds, and the same seed repeats a run exactly. Some fibers are drawn to be slow,
// as a warp that waits for memory is: others pass them by many steps.
//
// A barrier or a warp operation that not all its threads reach, lanes that meet for different
// operations, and threads that never end are errors that say so. Shared memory is a heap block of
// the exact size that the launch asks for, filled with a pattern: AddressSanitizer sees accesses
// beyond its end. Every interleaving here is sequentially consistent: a missing fence shows
// nowhere.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define NESTPIPE_ROLLED

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned of_x = 1, unsigned of_y = 1, unsigned of_z = 1)
      : x(of_x), y(of_y), z(of_z) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulated_cuda {

constexpr unsigned kWarpSize = 32;

struct Schedule {
  std::uint64_t seed = 1;
  int resident_blocks = 3;  // how many blocks of a launch run among each other
  int yield_percent = 30;   // how often a racing access is a point where others may run
};
Schedule& schedule();  // of the launches to come

// The calling fiber's place.
struct Place {
  dim3 thread, block, block_shape, grid_shape;
  unsigned lane = 0;
  unsigned char* shared_memory = nullptr;
};
const Place& place();

// Lets others run before an access that races, or does not, as drawn.
void perhaps_yield();

// Waits for all threads of the block that have not returned.
void barrier();

// What lanes of a warp do together.
enum class Meeting { kSync, kVote, kShuffle, kMatch };
using Values = std::array<std::uint64_t, kWarpSize>;
// Waits for all lanes in `mask` that have not returned; the values that each of them brought.
Values meet(unsigned mask, Meeting kind, std::uint64_t value);

// Runs `body` once per thread of the grid. Throws std::runtime_error for what the header's
// beginning lists, and what a thread threw.
void run(const std::function<void()>& body, dim3 grid, dim3 block, std::size_t shared_bytes);

template <typename T>
std::uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8, "a lane brings up to 8 bytes");
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}

template <typename T>
T from_word(std::uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// The types that CUDA's integer atomics take.
template <typename T>
constexpr bool kAtomic =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>;

template <typename T, typename Change>
T change(T* address, const Change& changed) {
  static_assert(kAtomic<T>, "CUDA has atomics of int, unsigned and unsigned long long");
  perhaps_yield();
  const T before = *address;
  *address = changed(before);
  return before;
}

}  // namespace emulated_cuda

#define threadIdx (::emulated_cuda::place().thread)
#define blockIdx (::emulated_cuda::place().block)
#define blockDim (::emulated_cuda::place().block_shape)
#define gridDim (::emulated_cuda::place().grid_shape)

inline void __syncthreads() { emulated_cuda::barrier(); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  emulated_cuda::meet(mask, emulated_cuda::Meeting::kSync, 0);
}
inline void __threadfence() {}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const auto values = emulated_cuda::meet(mask, emulated_cuda::Meeting::kVote, predicate != 0);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(values[lane]) << lane;
  return votes;
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  const auto word = emulated_cuda::to_word(value);
  return emulated_cuda::from_word<T>(
      emulated_cuda::meet(mask, emulated_cuda::Meeting::kShuffle, word)[source & 31]);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const unsigned lane = emulated_cuda::place().lane;
  const auto word = emulated_cuda::to_word(value);
  const auto values = emulated_cuda::meet(mask, emulated_cuda::Meeting::kShuffle, word);
  return emulated_cuda::from_word<T>(values[lane >= delta ? lane - delta : lane]);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int other) {
  const unsigned lane = emulated_cuda::place().lane;
  const auto word = emulated_cuda::to_word(value);
  const auto values = emulated_cuda::meet(mask, emulated_cuda::Meeting::kShuffle, word);
  return emulated_cuda::from_word<T>(values[(lane ^ static_cast<unsigned>(other)) & 31]);
}

template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  const auto word = emulated_cuda::to_word(value);
  const auto values = emulated_cuda::meet(mask, emulated_cuda::Meeting::kMatch, word);
  unsigned same = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1u) != 0 && values[lane] == word) same |= 1u << lane;
  }
  return same;
}

// One device, which is there.
enum cudaError_t { cudaSuccess, cudaErrorInvalidDevice };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "invalid device ordinal"; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 0, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 0, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }

template <typename T>
T atomicCAS(T* address, T expected, T desired) {
  return emulated_cuda::change(address, [&](T now) { return now == expected ? desired : now; });
}
template <typename T>
T atomicAdd(T* address, T value) {
  return emulated_cuda::change(address, [&](T now) { return static_cast<T>(now + value); });
}
template <typename T>
T atomicMin(T* address, T value) {
  return emulated_cuda::change(address, [&](T now) { return value < now ? value : now; });
}
template <typename T>
T atomicMax(T* address, T value) {
  return emulated_cuda::change(address, [&](T now) { return now < value ? value : now; });
}

namespace nestpipe {
namespace cuda {

template <typename T>
T load_racing(const T* address) {
  emulated_cuda::perhaps_yield();
  return *address;
}
template <typename T>
T load_acquire(const T* address) {
  return load_racing(address);
}
template <typename T>
void store_racing(T* address, T value) {
  emulated_cuda::perhaps_yield();
  *address = value;
}
template <typename T>
T swap_if_equal_release(T* address, T expected, T desired) {
  return atomicCAS(address, expected, desired);
}

template <typename T>
T& shared_memory() {
  return *reinterpret_cast<T*>(emulated_cuda::place().shared_memory);
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
            void* /*stream*/, Arguments... arguments) {
  emulated_cuda::run([&] { kernel(arguments...); }, grid, block, shared_bytes);
}

}  // namespace cuda
}  // namespace nestpipe
