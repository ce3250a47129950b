// Distinct (table, key) pairs of a list in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nestpipe/cuda/stream.h"
#include "nestpipe/dedup.h"

namespace nestpipe {
namespace cuda {

// All in device memory. Entries of unique_index and counts from *num_unique on are unspecified.
struct DedupOutput {
  std::int64_t* unique_index;  // [size], where each pair first appears, ascending
  std::int32_t* inverse;       // [size]
  std::int64_t* counts;        // [size]
  std::int64_t* num_unique;    // [1]
};

// Bytes of device memory that a call for `size` keys needs while it runs.
std::size_t dedup_work_bytes(std::int64_t size);

// Numbers the pairs of `input` (in device memory) in order of first appearance: what Dedup gives,
// in the same bits. Does not synchronize: the number of pairs stays in device memory.
void dedup(const KeyList& input, void* work, const DedupOutput& output, Stream stream);

}  // namespace cuda
}  // namespace nestpipe
