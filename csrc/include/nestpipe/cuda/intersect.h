// Positions of the (table, key) pairs that two lists in device memory share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nestpipe/cuda/stream.h"
#include "nestpipe/dedup.h"

namespace nestpipe {
namespace cuda {

// All in device memory. Entries from *num_matches on are unspecified.
struct IntersectOutput {
  std::int64_t* index_a;      // [b.size]
  std::int64_t* index_b;      // [b.size], ascending
  std::int64_t* num_matches;  // [1]
};

// Bytes of device memory that a call needs while it runs.
std::size_t intersect_work_bytes(std::int64_t size_a, std::int64_t size_b);

// What the CPU's intersect gives, in the same bits. Does not synchronize: the number of matches
// stays in device memory.
void intersect(const KeyList& a, const KeyList& b, void* work, const IntersectOutput& output,
               Stream stream);

}  // namespace cuda
}  // namespace nestpipe
