// Search, insertion, removal and growth of a table's index.
#include "nestpipe/key_index.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

namespace nestpipe {
namespace {

// The next length after `num_buckets` in shard i's series. Lengths decide where entries lie, never
// what a search returns.
std::uint64_t longer(std::uint32_t num_buckets, std::uint32_t shard_number) {
  double length = std::pow(1.5, shard_number / static_cast<double>(kNumShards));
  while (static_cast<std::uint64_t>(length) <= num_buckets) length *= 1.5;
  return static_cast<std::uint64_t>(length);
}

}  // namespace

KeyIndex::Place KeyIndex::locate(const Shard& shard, std::uint64_t hash, std::int64_t key) {
  if (shard.num_buckets == 0) return {nullptr, 0};
  std::uint32_t at = home(shard, hash);
  for (std::uint32_t visited = 0; visited < shard.num_buckets; ++visited) {
    Bucket& bucket = shard.buckets[at];
    const unsigned equal = equal_slots(bucket, key);
    if (equal != 0) return {&bucket, __builtin_ctz(equal)};
    if (bucket.passed == 0) break;
    at = next(shard, at);
  }
  return {nullptr, 0};
}

std::uint32_t KeyIndex::find(std::uint64_t hash, std::int64_t key) const {
  const Place place = locate(shards_[shard_of(hash)], hash, key);
  return place.bucket == nullptr ? kNoRow : place.bucket->rows[place.slot];
}

std::uint32_t* KeyIndex::place(const Shard& shard, std::uint64_t hash, std::int64_t key,
                               std::uint32_t row) {
  std::uint32_t at = home(shard, hash);
  while (shard.buckets[at].count == kSlots) {
    Bucket& full = shard.buckets[at];
    if (full.passed != kPassedMax) ++full.passed;
    at = next(shard, at);
  }
  Bucket& bucket = shard.buckets[at];
  bucket.keys[bucket.count] = key;
  bucket.rows[bucket.count] = row;
  return &bucket.rows[bucket.count++];
}

std::uint32_t KeyIndex::insert(std::uint64_t hash, std::int64_t key, std::uint32_t row) {
  return enter(hash, key, row).found;
}

KeyIndex::Inserted KeyIndex::enter(std::uint64_t hash, std::int64_t key, std::uint32_t row) {
  const std::uint32_t shard_number = shard_of(hash);
  Shard& shard = shards_[shard_number];
  const bool full =
      shard.num_keys + std::uint64_t{1} > std::uint64_t{shard.num_buckets} * (kSlots - 1);
  if (!full) {  // Most keys find room at home.
    Bucket& bucket = shard.buckets[home(shard, hash)];
    if (bucket.passed == 0 && bucket.count < kSlots && equal_slots(bucket, key) == 0) {
      ++shard.num_keys;
      bucket.keys[bucket.count] = key;
      bucket.rows[bucket.count] = row;
      return {kNoRow, &bucket.rows[bucket.count++]};
    }
  }
  const Place found = locate(shard, hash, key);
  if (found.bucket != nullptr) return {found.bucket->rows[found.slot], nullptr};
  // 4 of 5 slots per bucket are used at most.
  if (full) grow(shard_number);
  std::uint32_t* const placed = place(shard, hash, key, row);
  ++shard.num_keys;
  return {kNoRow, placed};
}

void KeyIndex::assign(std::uint64_t hash, std::int64_t key, std::uint32_t row) {
  const Place found = locate(shards_[shard_of(hash)], hash, key);
  found.bucket->rows[found.slot] = row;
}

std::uint32_t KeyIndex::erase(std::uint64_t hash, std::int64_t key) {
  Shard& shard = shards_[shard_of(hash)];
  const Place found = locate(shard, hash, key);
  if (found.bucket == nullptr) return kNoRow;
  const std::uint32_t row = found.bucket->rows[found.slot];
  take_out(&shard, hash, found);
  return row;
}

void KeyIndex::erase_row(std::uint64_t hash, std::uint32_t row) {
  Shard& shard = shards_[shard_of(hash)];
  for (std::uint32_t at = home(shard, hash);; at = next(shard, at)) {
    Bucket& bucket = shard.buckets[at];
    for (int slot = 0; slot < bucket.count; ++slot) {
      if (bucket.rows[slot] == row) return take_out(&shard, hash, {&bucket, slot});
    }
  }
}

void KeyIndex::take_out(Shard* shard, std::uint64_t hash, const Place& place) {
  Bucket& bucket = *place.bucket;
  --bucket.count;
  bucket.keys[place.slot] = bucket.keys[bucket.count];
  bucket.rows[place.slot] = bucket.rows[bucket.count];
  --shard->num_keys;
  for (std::uint32_t at = home(*shard, hash); &shard->buckets[at] != &bucket;
       at = next(*shard, at)) {
    Bucket& between = shard->buckets[at];
    if (between.passed != kPassedMax) --between.passed;
  }
}

std::uint64_t KeyIndex::bytes() const {
  std::vector<const Block*> chunks;
  const std::shared_ptr<Block> newest = arrays_->newest();
  if (newest != nullptr) chunks.push_back(newest.get());
  for (const ChunkedArrays::Array& array : buckets_) {
    if (array.chunk() != nullptr) chunks.push_back(array.chunk().get());
  }
  std::sort(chunks.begin(), chunks.end());
  chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  std::uint64_t sum = 0;
  for (const Block* chunk : chunks) sum += chunk->bytes();
  return sum;
}

void KeyIndex::grow(std::uint32_t shard_number) {
  resize(shard_number, longer(shards_[shard_number].num_buckets, shard_number));
}

void KeyIndex::reserve(std::uint64_t num_keys) {
  // Keys spread over shards at random: hardly one has more than the mean and three deviations.
  const double mean = static_cast<double>(num_keys) / kNumShards;
  const double wanted = mean + 3.0 * std::sqrt(mean);
  for (std::uint32_t shard_number = 0; shard_number < kNumShards; ++shard_number) {
    const std::uint64_t now = shards_[shard_number].num_buckets;
    std::uint64_t num_buckets = now;
    while (static_cast<double>(num_buckets * (kSlots - 1)) < wanted && num_buckets <= kNoRow) {
      num_buckets = longer(static_cast<std::uint32_t>(num_buckets), shard_number);
    }
    if (num_buckets != now) resize(shard_number, num_buckets);
  }
}

void KeyIndex::resize(std::uint32_t shard_number, std::uint64_t num_buckets) {
  Shard& shard = shards_[shard_number];
  if (num_buckets > 0xFFFFFFFFull) throw std::bad_alloc();
  const ChunkedArrays::Array array = arrays_->take(num_buckets * sizeof(Bucket));
  const Shard grown{static_cast<Bucket*>(array.data()), static_cast<std::uint32_t>(num_buckets),
                    shard.num_keys};
  for (std::uint32_t b = 0; b < shard.num_buckets; ++b) {
    const Bucket& bucket = shard.buckets[b];
    for (int slot = 0; slot < bucket.count; ++slot) {
      place(grown, hash(bucket.keys[slot]), bucket.keys[slot], bucket.rows[slot]);
    }
  }
  shard = grown;
  buckets_[shard_number] = array;
}

}  // namespace nestpipe
