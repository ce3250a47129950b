// Finding the way in a list of bags in device memory; private to this folder.
#pragma once

#include <cstdint>

#include "nestpipe/cuda/lookup_pool.h"
#include "nestpipe/cuda/platform.h"

namespace nestpipe {
namespace cuda {

// The last i < size with start(i) <= value; start(0) is one, and starts do not descend.
template <typename Start>
__device__ __forceinline__ std::int64_t last_from(std::int64_t size, std::int64_t value,
                                                  const Start& start) {
  std::int64_t low = 1, high = size;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (start(middle) <= value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

__device__ __forceinline__ std::int64_t bag_of(const PoolBags& bags, std::int64_t occurrence) {
  return last_from(bags.num_bags, occurrence,
                   [&](std::int64_t bag) { return bags.bag_offsets[bag]; });
}

__device__ __forceinline__ PoolSegment segment_of(const PoolBags& bags, std::int64_t bag) {
  return bags.segments[last_from(bags.num_segments, bag, [&](std::int64_t segment) {
    return bags.segments[segment].first_bag;
  })];
}

__device__ __forceinline__ bool has_mode(const PoolSegment& segment, PoolMode mode) {
  return segment.mode == static_cast<std::int64_t>(mode);
}

// The row of an occurrence; -1 for padding and for what is out of range, which `notes` notes.
__device__ __forceinline__ std::int64_t slot_of(const PoolBags& bags, std::int64_t occurrence,
                                                std::int64_t num_rows, bool notes,
                                                std::int64_t* bad_position) {
  const std::int64_t slot = bags.slots_are_int64
                                ? static_cast<const std::int64_t*>(bags.slots)[occurrence]
                                : static_cast<const std::int32_t*>(bags.slots)[occurrence];
  if (slot >= -1 && slot < num_rows) return slot;
  if (notes && bad_position != nullptr) {  // -1 is the largest unsigned number
    atomicMin(reinterpret_cast<unsigned long long*>(bad_position),
              static_cast<unsigned long long>(occurrence));
  }
  return -1;
}

}  // namespace cuda
}  // namespace nestpipe
