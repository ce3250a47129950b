// The index of one table: from a key to the number of its row.
//
// Layout. 256 shards by bits 40-47 of the key's hash; a shard is an array of buckets of one cache
// line each: 5 keys, 5 row numbers, `count` used slots (always the first ones) and `passed`. A
// key's home bucket is the hash's low 32 bits scaled to the array, so arrays may have any length. A
// key goes to the first bucket from its home on that has room, and each full bucket on the way
// counts it in `passed`. A search ends at the first bucket that nobody passed.
//
// No key is reserved: `count` alone says which slots are used. No tombstones: erasing moves the
// bucket's last slot into the gap and takes the key out of the `passed` of the buckets between its
// home and its place. A `passed` that reached its maximum stays there, which costs time on later
// searches but never an answer.
//
// Load is at most 0.8. A full shard moves its entries to an array 1.5 times as long and frees the
// old one. Shard i's lengths are the series 1.5^(k + i / 256), so the shards of an evenly filled
// table grow one after another, not in the same call, and over and over in the same order: so their
// arrays lie side by side on huge pages, and are left in the order in which they were taken.
//
// Concurrency. A method touches the shard of its hash alone: different threads may work on
// different shards without locks. Searches may run together with searches.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "nestpipe/hash.h"
#include "nestpipe/memory.h"
#include "nestpipe/request_line.h"

namespace nestpipe {

constexpr int kNumShards = 256;
constexpr std::uint32_t kNoRow = 0xFFFFFFFFu;

class KeyIndex {
 public:
  KeyIndex(std::uint64_t table_hash, MemoryAccount* account)
      : table_hash_(table_hash), arrays_(std::make_unique<ChunkedArrays>(account)) {}

  std::uint64_t table_hash() const { return table_hash_; }
  std::uint64_t hash(std::int64_t key) const { return hash_key(table_hash_, key); }

  // `hash` is always this->hash(key).
  void prefetch(std::uint64_t hash) const {
    const Shard& shard = shards_[shard_of(hash)];
    if (shard.num_buckets != 0) request_line(&shard.buckets[home(shard, hash)]);
  }
  std::uint32_t find(std::uint64_t hash, std::int64_t key) const;
  // find() as far as the key's home bucket goes, without a branch to mispredict: *row is the key's
  // row, or kNoRow. True if the key, not found there, may lie in a later bucket, whose line has
  // been requested: then find() decides.
  bool find_at_home(std::uint64_t hash, std::int64_t key, std::uint32_t* row) const {
    const Shard& shard = shards_[shard_of(hash)];
    *row = kNoRow;
    if (shard.num_buckets == 0) return false;
    const std::uint32_t at = home(shard, hash);
    const Bucket& bucket = shard.buckets[at];
    const unsigned equal = equal_slots(bucket, key);
    const std::uint32_t found = bucket.rows[__builtin_ctz(equal | 1u << (kSlots - 1))];
    *row = equal != 0 ? found : kNoRow;
    const bool further = (equal == 0) & (bucket.passed != 0);
    if (further) request_line(&shard.buckets[next(shard, at)]);
    return further;
  }
  // The row that the key has, or kNoRow after giving it `row`. Throws std::bad_alloc, changing
  // nothing.
  std::uint32_t insert(std::uint64_t hash, std::int64_t key, std::uint32_t row);
  // The same; if it was given the row, also where the index holds it: valid until the shard grows
  // or a key leaves it.
  struct Inserted {
    std::uint32_t found;
    std::uint32_t* row;
  };
  Inserted enter(std::uint64_t hash, std::int64_t key, std::uint32_t row);
  // Changes when the shard of a hash grows.
  const void* shard_data(std::uint64_t hash) const { return shards_[shard_of(hash)].buckets; }
  // Makes room for about num_keys keys in all. Throws std::bad_alloc; no key is lost.
  void reserve(std::uint64_t num_keys);
  // Gives a key that is present another row.
  void assign(std::uint64_t hash, std::int64_t key, std::uint32_t row);
  // The row that the key had, or kNoRow.
  std::uint32_t erase(std::uint64_t hash, std::int64_t key);
  // Takes out the key with this hash that has `row`; it is present.
  void erase_row(std::uint64_t hash, std::uint32_t row);

  std::uint32_t size_of_shard(int shard_number) const { return shards_[shard_number].num_keys; }
  // Calls visit(key, row) for every entry of a shard, in no particular order.
  template <typename Visit>
  void for_each_in_shard(int shard_number, const Visit& visit) const {
    const Shard& shard = shards_[shard_number];
    for (std::uint32_t b = 0; b < shard.num_buckets; ++b) {
      const Bucket& bucket = shard.buckets[b];
      for (int slot = 0; slot < bucket.count; ++slot) visit(bucket.keys[slot], bucket.rows[slot]);
    }
  }
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (int shard = 0; shard < kNumShards; ++shard) for_each_in_shard(shard, visit);
  }
  std::uint64_t bytes() const;

 private:
  static constexpr int kSlots = 5;
  static constexpr std::uint16_t kPassedMax = 0xFFFF;

  struct alignas(64) Bucket {
    std::int64_t keys[kSlots];
    std::uint32_t rows[kSlots];
    std::uint16_t passed;
    std::uint8_t count;
  };
  static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");

  struct Shard {
    Bucket* buckets = nullptr;
    std::uint32_t num_buckets = 0;
    std::uint32_t num_keys = 0;
  };

  struct Place {
    Bucket* bucket;  // nullptr: the key is absent.
    int slot;
  };

  static std::uint32_t home(const Shard& shard, std::uint64_t hash) {
    return static_cast<std::uint32_t>((std::uint64_t{group_of(hash)} * shard.num_buckets) >> 32);
  }
  static std::uint32_t next(const Shard& shard, std::uint32_t bucket) {
    return bucket + 1 == shard.num_buckets ? 0 : bucket + 1;
  }
  // A bit for each slot that holds the key.
  static unsigned equal_slots(const Bucket& bucket, std::int64_t key) {
    unsigned equal = 0;
    for (int slot = 0; slot < kSlots; ++slot) {
      equal |= static_cast<unsigned>(bucket.keys[slot] == key) << slot;
    }
    return equal & ((1u << bucket.count) - 1);
  }
  static Place locate(const Shard& shard, std::uint64_t hash, std::int64_t key);
  static std::uint32_t* place(const Shard& shard, std::uint64_t hash, std::int64_t key,
                              std::uint32_t row);
  static void take_out(Shard* shard, std::uint64_t hash, const Place& place);
  void grow(std::uint32_t shard_number);
  void resize(std::uint32_t shard_number, std::uint64_t num_buckets);

  std::uint64_t table_hash_;
  std::unique_ptr<ChunkedArrays> arrays_;
  std::array<Shard, kNumShards> shards_;
  std::array<ChunkedArrays::Array, kNumShards> buckets_;  // What the shards point to.
};

}  // namespace nestpipe
