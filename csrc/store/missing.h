// The keys of one call that have no row yet, and what becomes of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "by_shard.h"
#include "nestpipe/scratch.h"
#include "nestpipe/store.h"

namespace nestpipe {

struct EmbeddingStore::Missing {
  // A missing key beside its neighbours of the same shard, so that passes over shards read memory
  // in order.
  struct Entry {
    std::int64_t key;
    std::uint32_t number;  // Among the missing.
    std::int32_t table;
    std::uint32_t* row;  // Where its index holds its row number; null where it is not a first one.
  };

  Missing(const KeySpan& call, const std::int64_t* call_counts) : in(call), counts(call_counts) {}

  KeySpan in;
  const std::int64_t* counts;         // Of the call, or null
  std::uint32_t num_missing = 0;      // m
  Scratch<std::int64_t> positions;    // [m] where in the call, ascending
  Scratch<std::uint64_t> hashes;      // [m]
  ByShard by_shard;                   // of m
  Scratch<Entry> entries;             // [m] in the order of by_shard
  std::vector<std::uint8_t> grown;    // [kNumShards] an index grew: `row` is not valid there
  Scratch<std::uint32_t> first;       // [m] the first of the missing with the same key
  std::atomic<bool> repeats{false};   // Some are not first ones.
  Scratch<std::int64_t> occurrences;  // [m] of first ones: in this call; empty: as own_count()
  std::vector<std::int64_t> before;   // [m] of first ones: counted earlier; empty: all 0
  Scratch<std::uint8_t> admitted;     // [m] of first ones; empty: all
  Scratch<std::uint32_t> rows;        // [m] of first ones: row number, kNoRow where none
  std::vector<std::int64_t> num_new;  // [tables] keys admitted
  // `rows` holds the numbers of all, should none be repeated, and the index gets these at once.
  bool numbered = false;
  // State of the store once all is done.
  std::vector<std::int64_t> sizes;  // [tables]
  std::int64_t num_rows = 0;
  std::int64_t num_reused = 0;  // Of the free rows, the lowest.
  bool all_have_rows = false;

  std::uint32_t count() const { return num_missing; }
  std::int64_t key(std::uint32_t i) const { return in.keys[positions[i]]; }
  std::int32_t table(std::uint32_t i) const { return in.tables[positions[i]]; }
  std::int64_t own_count(std::uint32_t i) const {
    return counts == nullptr ? 1 : counts[positions[i]];
  }
};

}  // namespace nestpipe
