// Which new keys get a row: rules, and counts of keys that have none.
//
// The rule is written in python/nestpipe_kernels/policy/admission.py. Counts are exact (an index
// from key to count) or approximate (a filter). A filter is an array of blocks of cells; a block
// serves a range of virtual slices, is allocated when one of its keys is first counted, and holds
// four 8-bit cells of each of its keys. The smallest of them is the count; counting raises those
// below the new count. A filter never forgets.
//
// Counting keys whose hashes have different shards (exact) is safe on different threads; a filter
// is counted in on one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "nestpipe/key_index.h"
#include "nestpipe/memory.h"

namespace nestpipe {

enum class AdmissionKind : int { kAll = 0, kMinFrequency = 1, kProbability = 2 };

struct AdmissionRule {
  AdmissionKind kind = AdmissionKind::kAll;
  std::int64_t count = 1;         // kMinFrequency: occurrences needed.
  std::int64_t filter_cells = 0;  // kMinFrequency: bytes of the filter; 0: exact counts.
  double probability = 1.0;       // kProbability
  std::uint64_t seed = 0;         // kProbability
};

// What was there before a count changed: an exact count (0: none), or the four cells of a filter.
struct CountChange {
  std::int64_t key;
  std::int32_t table;  // -1: nothing changed
  std::uint32_t before;
};

struct CountsState {
  std::vector<std::int64_t> keys;    // Exact: keys, or of a filter: numbers of its blocks.
  std::vector<std::int64_t> counts;  // Exact: [keys].
  std::vector<std::uint8_t> cells;   // Filter: [blocks, cells per block].
};

class AdmissionCounts {
 public:
  AdmissionCounts(const AdmissionRule& rule, std::uint64_t table_hash, MemoryAccount* account);

  // Whether a key with this many occurrences, those of the call included, may have a row.
  bool admits(std::uint64_t hash, std::int64_t occurrences) const;
  // Whether keys without a row are counted at all.
  bool counting() const { return rule_.kind == AdmissionKind::kMinFrequency; }
  bool filtering() const { return !blocks_.empty(); }
  std::int64_t num_blocks() const { return static_cast<std::int64_t>(blocks_.size()); }
  std::int64_t cells_per_block() const { return cells_per_block_; }

  std::int64_t count(std::uint64_t hash, std::int64_t key) const;
  // Makes room for counting the key in a filter. Throws std::bad_alloc.
  void reserve(std::uint64_t hash);
  // Adds occurrences to the key's count, which stops at its largest; what was there before. Throws
  // std::bad_alloc, changing nothing (a filter does not, with room).
  std::uint32_t add(std::uint64_t hash, std::int64_t key, std::int64_t occurrences);
  // Forgets an exact count; what it was.
  std::uint32_t forget(std::uint64_t hash, std::int64_t key);
  // Puts back what `add` or `forget` returned. Exact counts of new keys must go before forgotten
  // ones return; then nothing is allocated. Filters are restored newest first.
  void restore(std::uint64_t hash, std::int64_t key, std::uint32_t before);

  void clear();
  std::uint64_t bytes() const;
  // Of index shards first .. end - 1, by (shard, key); of a filter, that part of all its blocks.
  CountsState state(int first, int end) const;
  void load(const CountsState& state);

 private:
  struct Cells {
    std::uint8_t* at[4];
  };
  std::uint32_t block_of(std::uint64_t hash) const;
  Cells cells_of(std::uint64_t hash) const;

  AdmissionRule rule_;
  MemoryAccount* account_;
  KeyIndex exact_;  // Key -> count.
  std::int64_t cells_per_block_ = 0;
  std::vector<Block> blocks_;  // Empty where counts are exact.
};

}  // namespace nestpipe
