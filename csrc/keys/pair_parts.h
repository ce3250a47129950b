// Pairs of a list dealt to partitions by hash, so that the table of each fits a cache.
//
// The list is cut into parts, one after the other, and each part deals its pairs on its own: a
// partition's pairs of a part stand in a chain of chunks. Nothing is counted beforehand, and
// reading a part again in order finds each pair at the next place of its chain. A block of
// positions that all repeat the pair before it is not dealt: the pair before it is noted as
// weighing more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "hash_pair.h"
#include "nestpipe/dedup.h"
#include "nestpipe/request_line.h"

namespace nestpipe {

constexpr std::int64_t kChunk = 64;  // Entries.
constexpr std::int64_t kBlock = 32;  // Positions.
constexpr std::uint16_t kRepeats = 0xFFFF;

// One entry for each pair that was dealt; chunks of kChunk entries.
struct PairEntries {
  std::uint64_t* hashes;
  std::int32_t* tables;  // Null without tables.
  // The id of the pair, as its complement where the pair first appears.
  std::int32_t* ids;
  std::uint32_t* next_chunk;  // The first entry of the chunk after each full one.
  // The partition at each position; kRepeats at the first one of a block that was not dealt.
  std::uint16_t* partition_at;
};

template <typename T>
void prefetch_chunk(const T* chunk) {
  for (std::int64_t i = 0; i < kChunk; i += 64 / static_cast<std::int64_t>(sizeof(T))) {
    request_line(chunk + i);
  }
}

// Aligned to two lines: threads write to neighbours.
class alignas(128) PairPart {
 public:
  struct Repeats {
    std::uint32_t entry;
    std::uint32_t times;
    std::int32_t next;  // Of the same partition, or -1.
  };

  PairPart() = default;
  PairPart(std::int64_t begin, std::int64_t end, int bits, std::uint32_t first_chunk)
      : begin_(begin), end_(end), bits_(bits), first_chunk_(first_chunk) {}

  static std::int64_t chunks_for(std::int64_t size, int bits) {
    return (std::int64_t{1} << bits) + size / kChunk;
  }

  std::int64_t begin() const { return begin_; }
  std::int64_t end() const { return end_; }
  std::uint32_t first_entry(std::int64_t partition) const {
    return (first_chunk_ + static_cast<std::uint32_t>(partition)) *
           static_cast<std::uint32_t>(kChunk);
  }

  template <bool kTables>
  void deal(const KeyList& list, const PairEntries& entries) {
    const std::int64_t num_partitions = std::int64_t{1} << bits_;
    next_.resize(static_cast<std::size_t>(num_partitions));
    num_full_.assign(static_cast<std::size_t>(num_partitions), 0);
    for (std::int64_t p = 0; p < num_partitions; ++p) next_[p] = first_entry(p);
    free_entry_ = first_entry(num_partitions);
    std::uint32_t last = 0;
    std::uint64_t hashes[kBlock];
    for (std::int64_t block = begin_; block < end_; block += kBlock) {
      const std::int64_t count = std::min(kBlock, end_ - block);
      if (block > begin_ && repeats<kTables>(list, block, count)) {
        entries.partition_at[block] = kRepeats;
        note_repeats(last, count, partition_of(hashes[kBlock - 1]));
        continue;
      }
      for (std::int64_t i = 0; i < count; ++i) {
        hashes[i] = hash_pair(list.keys[block + i], kTables ? list.tables[block + i] : 0);
      }
      last = deal_block<kTables>(list, block, count, hashes, entries);
    }
  }

  // How many entries a partition has here.
  std::int64_t size(std::int64_t partition) const {
    return num_full_[partition] * kChunk + next_[partition] % kChunk;
  }

  // body(begin, end) for each chunk of a partition, in order of positions.
  template <typename Body>
  void for_chunks(const PairEntries& entries, std::int64_t partition, const Body& body) const {
    std::uint32_t begin = first_entry(partition);
    for (std::int64_t i = 0; i < num_full_[partition]; ++i) {
      const std::uint32_t next = entries.next_chunk[begin / kChunk];
      prefetch_chunk(entries.hashes + next);
      prefetch_chunk(entries.ids + next);
      body(begin, begin + static_cast<std::uint32_t>(kChunk));
      begin = next;
    }
    body(begin, next_[partition]);
  }

  // body(entry, times) for each entry of a partition that blocks repeat so many times more.
  template <typename Body>
  void for_repeats(std::int64_t partition, const Body& body) const {
    if (repeats_.empty()) return;
    for (std::int32_t at = first_repeats_[partition]; at >= 0; at = repeats_[at].next) {
      body(repeats_[at].entry, repeats_[at].times);
    }
  }

 private:
  std::int64_t partition_of(std::uint64_t hash) const {
    return static_cast<std::int64_t>(hash >> 1 >> (63 - bits_));
  }

  // Returns the entry of the last pair.
  template <bool kTables>
  std::uint32_t deal_block(const KeyList& list, std::int64_t block, std::int64_t count,
                           const std::uint64_t* hashes, const PairEntries to) {
    std::uint32_t* const next = next_.data();
    const int shift = 63 - bits_;
    std::uint32_t entry = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto p = static_cast<std::int64_t>(hashes[i] >> 1 >> shift);
      entry = next[p];
      to.hashes[entry] = hashes[i];
      if (kTables) to.tables[entry] = list.tables[block + i];
      to.partition_at[block + i] = static_cast<std::uint16_t>(p);
      next[p] = entry + 1;
      if (__builtin_expect((entry + 1) % kChunk == 0, 0)) {
        to.next_chunk[entry / kChunk] = next[p] = free_entry_;
        prefetch_chunk(to.hashes + free_entry_);
        free_entry_ += static_cast<std::uint32_t>(kChunk);
        ++num_full_[p];
      }
    }
    return entry;
  }

  // Whether all pairs of a block are the one before it. One look at the first tells most blocks.
  template <bool kTables>
  static bool repeats(const KeyList& list, std::int64_t block, std::int64_t count) {
    const std::int64_t key = list.keys[block - 1];
    if (list.keys[block] != key) return false;
    std::uint64_t different = 0;
    for (std::int64_t i = block; i < block + count; ++i) {
      different |= static_cast<std::uint64_t>(list.keys[i] ^ key);
      if (kTables) different |= static_cast<std::uint32_t>(list.tables[i] ^ list.tables[block - 1]);
    }
    return different == 0;
  }

  void note_repeats(std::uint32_t entry, std::int64_t count, std::int64_t p) {
    if (!repeats_.empty() && repeats_.back().entry == entry) {
      repeats_.back().times += static_cast<std::uint32_t>(count);
      return;
    }
    if (repeats_.empty()) first_repeats_.assign(next_.size(), -1);
    repeats_.push_back({entry, static_cast<std::uint32_t>(count), first_repeats_[p]});
    first_repeats_[p] = static_cast<std::int32_t>(repeats_.size()) - 1;
  }

  std::int64_t begin_ = 0;
  std::int64_t end_ = 0;
  int bits_ = 0;
  std::uint32_t first_chunk_ = 0;
  std::uint32_t free_entry_ = 0;
  // By partition.
  std::vector<std::uint32_t> next_;  // Entry.
  std::vector<std::int64_t> num_full_;
  std::vector<std::int32_t> first_repeats_;
  std::vector<Repeats> repeats_;
};

}  // namespace nestpipe
