// Distinct (table, key) pairs of a list, with inverse and counts, in order of first appearance.
#pragma once

#include <cstdint>

namespace nestpipe {

// A list of (table, key) pairs. Every int64 is a key; without tables all keys belong to one table.
struct KeyList {
  const std::int64_t* keys;    // [size]
  const std::int32_t* tables;  // [size], or null
  std::int64_t size;           // at most 2^31 - 1
};

// Returns the number U of distinct pairs. unique_index[u] is the position where pair u first
// appears (ascending in u), inverse[i] the pair at position i, counts[u] how often it appears.
// Outputs have room for `size` entries; the first U of unique_index and counts are written. Linear
// time, hash-based, the same bits at any thread count.
std::int64_t dedup(const KeyList& input, std::int64_t* unique_index, std::int32_t* inverse,
                   std::int64_t* counts);

}  // namespace nestpipe
