// Distinct (table, key) pairs of a list, with inverse and counts, in order of first appearance.
#pragma once

#include <cstdint>
#include <memory>

namespace nestpipe {

// A list of (table, key) pairs. Every int64 is a key; without tables all keys belong to one table.
struct KeyList {
  const std::int64_t* keys;    // [size]
  const std::int32_t* tables;  // [size], or null
  std::int64_t size;           // at most 2^31 - 1
};

// In two steps, so that a caller can make room for as many results as there are. Linear time,
// hash-based, the same bits at any thread count. The list must stay as it is until the end.
class Dedup {
 public:
  // Finds the distinct pairs.
  explicit Dedup(const KeyList& input);
  ~Dedup();

  // The number U of distinct pairs.
  std::int64_t size() const;

  // unique_index[u] is the position where pair u first appears (ascending in u), counts[u] how
  // often it appears (both [U]); inverse[i] is the pair at position i. To be called once.
  void write(std::int64_t* unique_index, std::int32_t* inverse, std::int64_t* counts);

  class Steps;

 private:
  std::unique_ptr<Steps> steps_;
};

}  // namespace nestpipe
