// A set of (table, key) pairs that numbers them in order of insertion: the heart of dedup and
// intersect.
//
// Layout: `slots_` is an open-addressing table of 32-bit pair numbers (0 = empty, so no key value
// is reserved), probed linearly at a load of at most 1/2; the pairs themselves stand in arrays by
// number, from 1. A slot is 4 bytes, so a batch's table stays in the cache. Inserts run in blocks:
// hash and prefetch the slots, prefetch the pairs they name, then resolve. Resolving has no branch
// on "seen before or new", which no predictor can guess: every insert writes the next free pair,
// and the count of pairs moves on only if the slot was empty. Arrays are allocated for the largest
// possible set and touched as it grows. One thread at a time may insert; `find` may run in many
// threads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "nestpipe/dedup.h"
#include "nestpipe/hash.h"

namespace nestpipe {

// Low bits choose slots, high bits partitions.
inline std::uint64_t hash_pair(std::int64_t key, std::int32_t table) {
  const auto salt = static_cast<std::uint64_t>(static_cast<std::uint32_t>(table));
  return hash_key(salt * 0x9E3779B97F4A7C15ull, key);
}

template <bool kTables>
class PairSet {
 public:
  // What a run of inserts carries beside its pairs. Null positions: first_position + i; null
  // counts: 1 each.
  struct Extras {
    const std::uint32_t* positions;
    const std::uint32_t* counts;
    std::uint32_t first_position;
  };

  explicit PairSet(std::int64_t max_pairs)
      : keys_(new std::int64_t[max_pairs + 2]),
        tables_(kTables ? new std::int32_t[max_pairs + 2] : nullptr),
        positions_(new std::uint32_t[max_pairs + 2]),
        counts_(new std::uint32_t[max_pairs + 2]) {
    keys_[0] = 0;
    if (kTables) tables_[0] = 0;
    std::int64_t capacity = 64;
    while (capacity < 2 * max_pairs && capacity < kFirstCapacity) capacity *= 2;
    slots_.assign(static_cast<std::size_t>(capacity), 0);
  }

  std::int64_t size() const { return next_ - 1; }
  // Arrays by pair, [size()].
  const std::int64_t* keys() const { return keys_.get() + 1; }
  const std::int32_t* tables() const { return kTables ? tables_.get() + 1 : nullptr; }
  const std::uint32_t* positions() const { return positions_.get() + 1; }
  const std::uint32_t* counts() const { return counts_.get() + 1; }

  // out[i] = number (from 0) of pair i of the list, inserted if new. `max_pairs` bounds the set's
  // final size.
  void insert(const KeyList& list, const Extras& extras, std::int32_t* out) {
    std::uint64_t slot_of[kBlock];
    for (std::int64_t begin = 0; begin < list.size; begin += kBlock) {
      const int count = static_cast<int>(list.size - begin < kBlock ? list.size - begin : kBlock);
      if (repeats_last(list, begin, count)) {
        for (int i = 0; i < count; ++i) {
          counts_[last_] += extras.counts ? extras.counts[begin + i] : 1u;
          out[begin + i] = static_cast<std::int32_t>(last_ - 1);
        }
        continue;
      }
      while (2 * (static_cast<std::uint64_t>(next_) + kBlock) > slots_.size()) grow();
      prefetch_block(list, begin, count, slot_of);
      for (int i = 0; i < count; ++i) {
        const std::int64_t at = begin + i;
        const std::uint32_t position = extras.positions
                                           ? extras.positions[at]
                                           : extras.first_position + static_cast<std::uint32_t>(at);
        const std::uint32_t id = insert_one(list, at, slot_of[i], position);
        counts_[id] += extras.counts ? extras.counts[at] : 1u;
        out[at] = static_cast<std::int32_t>(id - 1);
        last_ = id;
      }
    }
  }

  // out[i] = number (from 0) of pair begin + i of the list, or -1.
  void find(const KeyList& list, std::int64_t begin, std::int64_t end, std::int32_t* out) const {
    std::uint64_t slot_of[kBlock];
    for (std::int64_t first = begin; first < end; first += kBlock) {
      const int count = static_cast<int>(end - first < kBlock ? end - first : kBlock);
      prefetch_block(list, first, count, slot_of);
      for (int i = 0; i < count; ++i) {
        std::uint64_t slot = slot_of[i];
        std::uint32_t id = slots_[slot];
        while (id != 0 && !equals(list, first + i, id)) {
          slot = (slot + 1) & (slots_.size() - 1);
          id = slots_[slot];
        }
        out[first + i] = static_cast<std::int32_t>(id) - 1;
      }
    }
  }

 private:
  static constexpr int kBlock = 32;
  static constexpr std::int64_t kFirstCapacity = std::int64_t{1} << 18;

  bool equals(const KeyList& list, std::int64_t at, std::uint32_t id) const {
    return (keys_[id] == list.keys[at]) & (!kTables || tables_[id] == list.tables[at]);
  }

  // Whether all pairs of a block are the one inserted last: long runs, as in sorted lists, need no
  // table. One look at the first pair tells most other lists.
  bool repeats_last(const KeyList& list, std::int64_t begin, int count) const {
    if (last_ == 0 || !equals(list, begin, last_)) return false;
    std::uint64_t different = 0;
    for (int i = 0; i < count; ++i) {
      different |= static_cast<std::uint64_t>(list.keys[begin + i] ^ keys_[last_]);
      if (kTables) different |= static_cast<std::uint32_t>(list.tables[begin + i] ^ tables_[last_]);
    }
    return different == 0;
  }

  void prefetch_block(const KeyList& list, std::int64_t begin, int count,
                      std::uint64_t* slot_of) const {
    const std::uint64_t mask = slots_.size() - 1;
    for (int i = 0; i < count; ++i) {
      slot_of[i] = hash_pair(list.keys[begin + i], kTables ? list.tables[begin + i] : 0) & mask;
      __builtin_prefetch(&slots_[slot_of[i]]);
    }
    for (int i = 0; i < count; ++i) {
      const std::uint32_t id = slots_[slot_of[i]];
      __builtin_prefetch(&keys_[id]);
      __builtin_prefetch(&counts_[id]);
      if (kTables) __builtin_prefetch(&tables_[id]);
    }
  }

  std::uint32_t insert_one(const KeyList& list, std::int64_t at, std::uint64_t slot,
                           std::uint32_t position) {
    std::uint32_t id = slots_[slot];
    bool fresh = id == 0;
    if (__builtin_expect(!(fresh | equals(list, at, id)), 0)) {
      do {
        slot = (slot + 1) & (slots_.size() - 1);
        id = slots_[slot];
      } while (id != 0 && !equals(list, at, id));
      fresh = id == 0;
    }
    keys_[next_] = list.keys[at];
    if (kTables) tables_[next_] = list.tables[at];
    positions_[next_] = position;
    counts_[next_] = 0;
    id |= next_ & (0u - static_cast<std::uint32_t>(fresh));
    slots_[slot] = id;
    next_ += fresh;
    return id;
  }

  void grow() {
    std::vector<std::uint32_t> larger(slots_.size() * 4, 0);
    const std::uint64_t mask = larger.size() - 1;
    constexpr std::uint32_t kAhead = 16;
    for (std::uint32_t id = 1; id < next_; ++id) {
      if (id + kAhead < next_) {
        const std::uint32_t later = id + kAhead;
        __builtin_prefetch(&larger[hash_pair(keys_[later], kTables ? tables_[later] : 0) & mask],
                           1);
      }
      std::uint64_t slot = hash_pair(keys_[id], kTables ? tables_[id] : 0) & mask;
      while (larger[slot] != 0) slot = (slot + 1) & mask;
      larger[slot] = id;
    }
    slots_.swap(larger);
  }

  std::unique_ptr<std::int64_t[]> keys_;
  std::unique_ptr<std::int32_t[]> tables_;
  std::unique_ptr<std::uint32_t[]> positions_;
  std::unique_ptr<std::uint32_t[]> counts_;
  std::vector<std::uint32_t> slots_;
  std::uint32_t next_ = 1;
  std::uint32_t last_ = 0;  // The pair inserted last; 0: none.
};

}  // namespace nestpipe
