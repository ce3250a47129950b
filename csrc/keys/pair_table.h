// A table of the pairs of a partition that numbers them in order of insertion.
//
// `slots_` is open addressing over 32-bit numbers (0 = empty, so no key value is reserved), probed
// linearly at a load of at most 1/2; what is known of a pair stands in arrays by number, from 1.
// Inserting has no branch on "seen before or new", which no predictor can guess: every insert
// writes the next free number, and the count moves on only if the slot was empty. A slot is a
// few bits of the hash times a factor that is drawn once in a process: nobody can choose keys that
// share slots, and results do not depend on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>

#include "nestpipe/request_line.h"
#include "pair_parts.h"

namespace nestpipe {

inline std::uint64_t drawn_factor() {
  static const std::uint64_t factor = [] {
    std::random_device source;
    return (static_cast<std::uint64_t>(source()) << 32 | source()) | 1;
  }();
  return factor;
}

template <bool kTables>
class PairTable {
 public:
  // Forgets all pairs; makes room for some of `max_pairs`.
  void clear(std::int64_t max_pairs) {
    int slot_bits = 7;
    while (slot_bits < kFirstSlotBits && (std::int64_t{1} << slot_bits) < 4 * max_pairs) {
      ++slot_bits;
    }
    if (slot_bits > slot_bits_room_) allocate(slot_bits);
    shift_ = 64 - slot_bits;
    std::fill_n(slots_.get(), num_slots(), 0u);
    next_ = 1;
  }

  std::uint32_t size() const { return next_ - 1; }

  // Inserts entries begin .. end - 1, at most kChunk, and writes their pairs' numbers, from
  // `first_id`.
  void insert(const PairEntries& entries, std::uint32_t begin, std::uint32_t end,
              std::int32_t first_id) {
    if (2 * (next_ + static_cast<std::uint64_t>(kChunk)) > num_slots()) grow();
    // Copies, since the compiler must take what is written for possible changes of members.
    std::uint32_t* const slots = slots_.get();
    Pair* const pairs = pairs_.get();
    std::int32_t* const ids = entries.ids;
    const std::uint64_t factor = factor_;
    const int shift = shift_;
    std::uint32_t next = next_;
    for (std::uint32_t entry = begin; entry < end; ++entry) {
      const std::uint64_t hash = entries.hashes[entry];
      const std::int32_t table = kTables ? entries.tables[entry] : 0;
      std::uint64_t slot = hash * factor >> shift;
      std::uint32_t id = slots[slot];
      if (__builtin_expect(differs(id, hash, table) != 0, 0)) {
        slot = probe_on(slot, hash, table);
        id = slots[slot];
      }
      const std::uint32_t fresh = 0u - static_cast<std::uint32_t>(id == 0);  // All bits, or none.
      pairs[next] = {hash, table, 0};
      id |= next & fresh;
      slots[slot] = id;
      next -= fresh;
      ++pairs[id].count;
      ids[entry] =
          (static_cast<std::int32_t>(id) - 1 + first_id) ^ static_cast<std::int32_t>(fresh);
    }
    next_ = next;
  }

  // Counts an entry that was inserted so many times more.
  void add(const PairEntries& entries, std::uint32_t entry, std::uint32_t times) {
    const std::uint64_t hash = entries.hashes[entry];
    const std::int32_t table = kTables ? entries.tables[entry] : 0;
    std::uint64_t slot = slot_of(hash);
    if (differs(slots_[slot], hash, table) != 0) slot = probe_on(slot, hash, table);
    pairs_[slots_[slot]].count += static_cast<std::int32_t>(times);
  }

  void copy_counts(std::int32_t* counts) const {
    for (std::uint32_t id = 1; id < next_; ++id) *counts++ = pairs_[id].count;
  }

 private:
  static constexpr int kFirstSlotBits = 15;

  struct Pair {
    std::uint64_t hash;
    std::int32_t table;
    std::int32_t count;
  };

  std::uint64_t num_slots() const { return std::uint64_t{1} << (64 - shift_); }
  std::uint64_t slot_of(std::uint64_t hash) const { return hash * factor_ >> shift_; }

  // 0 where a slot is empty or holds the pair. Arithmetic, for compilers make branches of
  // comparisons.
  std::uint64_t differs(std::uint32_t id, std::uint64_t hash, std::int32_t table) const {
    std::uint64_t bits = pairs_[id].hash ^ hash;
    if (kTables) bits |= static_cast<std::uint32_t>(pairs_[id].table ^ table);
    return bits & (0u - static_cast<std::uint64_t>(id != 0));
  }

  // The slot of the pair, or the empty one where it belongs.
  std::uint64_t probe_on(std::uint64_t slot, std::uint64_t hash, std::int32_t table) const {
    const std::uint64_t mask = num_slots() - 1;
    do {
      slot = (slot + 1) & mask;
    } while (differs(slots_[slot], hash, table) != 0);
    return slot;
  }

  void allocate(int slot_bits) {
    const std::int64_t room = (std::int64_t{1} << slot_bits) / 2 + 2;
    slots_ = uninitialized<std::uint32_t>(std::int64_t{1} << slot_bits);
    pairs_ = uninitialized<Pair>(room);
    slot_bits_room_ = slot_bits;
    pairs_[0] = {};
  }

  template <typename T>
  static std::unique_ptr<T[]> uninitialized(std::int64_t size) {
    return std::unique_ptr<T[]>(new T[static_cast<std::size_t>(size)]);
  }

  void grow() {
    const int slot_bits = 64 - shift_ + 2;
    const auto pairs = std::move(pairs_);
    allocate(std::max(slot_bits, slot_bits_room_));
    std::copy_n(pairs.get(), next_, pairs_.get());
    shift_ = 64 - slot_bits;
    std::fill_n(slots_.get(), num_slots(), 0u);
    const std::uint64_t mask = num_slots() - 1;
    constexpr std::uint32_t kAhead = 16;
    for (std::uint32_t id = 1; id < next_; ++id) {
      if (id + kAhead < next_) request_line_to_write(&slots_[slot_of(pairs_[id + kAhead].hash)]);
      std::uint64_t slot = slot_of(pairs_[id].hash);
      while (slots_[slot] != 0) slot = (slot + 1) & mask;
      slots_[slot] = id;
    }
  }

  const std::uint64_t factor_ = drawn_factor();
  int slot_bits_room_ = 0;
  int shift_ = 63;
  std::uint32_t next_ = 1;
  std::unique_ptr<std::uint32_t[]> slots_;
  std::unique_ptr<Pair[]> pairs_;  // By number.
};

}  // namespace nestpipe
