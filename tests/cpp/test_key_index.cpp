// The index of one table against std::map: random insertions and removals, crowded buckets, extreme
// keys, failing memory.
#include <cstdint>
#include <limits>
#include <map>
#include <new>
#include <random>
#include <vector>

#include "check.h"
#include "nestpipe/key_index.h"

namespace nestpipe {
namespace {

std::uint32_t find(const KeyIndex& index, std::int64_t key) {
  return index.find(index.hash(key), key);
}

void test_random_operations_match_a_map() {
  MemoryAccount account;
  KeyIndex index(hash_name("table"), &account);
  std::map<std::int64_t, std::uint32_t> expected;
  std::mt19937_64 random(1);
  for (std::uint32_t step = 0; step < 200000; ++step) {
    const auto key = static_cast<std::int64_t>(random() % 20000) - 10000;
    const auto known = expected.find(key);
    const std::uint32_t row = known == expected.end() ? kNoRow : known->second;
    // Phases of growing and of shrinking.
    if (random() % 10 < (step / 50000 % 2 == 0 ? 7u : 3u)) {
      CHECK_EQUAL(index.insert(index.hash(key), key, step), row);
      if (row == kNoRow) expected[key] = step;
    } else {
      CHECK_EQUAL(index.erase(index.hash(key), key), row);
      if (row != kNoRow) expected.erase(known);
    }
  }
  for (std::int64_t key = -10000; key < 10000; ++key) {
    const auto known = expected.find(key);
    CHECK_EQUAL(find(index, key), known == expected.end() ? kNoRow : known->second);
  }
}

void test_extreme_keys() {
  MemoryAccount account;
  KeyIndex index(0, &account);
  const std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
  const std::int64_t highest = std::numeric_limits<std::int64_t>::max();
  const std::vector<std::int64_t> keys = {0,       -1,         -2,        -5, lowest,
                                          highest, lowest + 1, 1ll << 52, 5,  5 + (1ll << 52)};
  for (std::size_t i = 0; i < keys.size(); ++i) {
    CHECK_EQUAL(find(index, keys[i]), kNoRow);
    CHECK_EQUAL(index.insert(index.hash(keys[i]), keys[i], static_cast<std::uint32_t>(i)), kNoRow);
  }
  for (std::size_t i = 0; i < keys.size(); ++i) CHECK_EQUAL(find(index, keys[i]), i);
}

// Keys of one shard and one home bucket: each bucket on the way is passed by all the later ones.
void test_one_crowded_home_bucket() {
  MemoryAccount account;
  KeyIndex index(0, &account);
  std::vector<std::int64_t> keys;
  for (std::int64_t key = 0; keys.size() < 60; ++key) {
    const std::uint64_t h = index.hash(key);
    if (shard_of(h) == 3 && group_of(h) < (1u << 27)) keys.push_back(key);
  }
  for (std::uint32_t i = 0; i < keys.size(); ++i) index.insert(index.hash(keys[i]), keys[i], i);
  for (std::uint32_t i = 0; i < keys.size(); i += 2) index.erase(index.hash(keys[i]), keys[i]);
  for (std::uint32_t i = 0; i < keys.size(); ++i) {
    CHECK_EQUAL(find(index, keys[i]), i % 2 == 0 ? kNoRow : i);
  }
  for (std::uint32_t i = 0; i < keys.size(); i += 2) index.insert(index.hash(keys[i]), keys[i], i);
  for (std::uint32_t i = 0; i < keys.size(); ++i) CHECK_EQUAL(find(index, keys[i]), i);
}

void test_failing_memory_changes_nothing_and_all_of_it_returns() {
  MemoryAccount account(40000);
  {
    KeyIndex index(0, &account);
    std::int64_t inserted = 0;
    bool full = false;
    for (std::int64_t key = 0; key < 100000 && !full; ++key) {
      try {
        index.insert(index.hash(key), key, static_cast<std::uint32_t>(key));
        ++inserted;
      } catch (const std::bad_alloc&) {
        full = true;
        CHECK_EQUAL(find(index, key), kNoRow);
      }
    }
    CHECK_EQUAL(full, true);
    for (std::int64_t key = 0; key < inserted; ++key) CHECK_EQUAL(find(index, key), key);
  }
  CHECK_EQUAL(account.used_bytes(), 0u);
}

void test_reserved_room_is_enough_and_keeps_what_is_there() {
  MemoryAccount account;
  KeyIndex index(hash_name("table"), &account);
  constexpr std::int64_t kKeys = 100000;
  for (std::int64_t key = 0; key < 1000; ++key) index.insert(index.hash(key), key, 7);
  index.reserve(kKeys);
  const std::uint64_t reserved = index.bytes();
  index.reserve(10);
  CHECK_EQUAL(index.bytes(), reserved);
  for (std::int64_t key = 0; key < kKeys; ++key) {
    CHECK_EQUAL(index.insert(index.hash(key), key, 8), key < 1000 ? 7u : kNoRow);
  }
  for (std::int64_t key = 0; key < kKeys; ++key)
    CHECK_EQUAL(find(index, key), key < 1000 ? 7u : 8u);
  // A shard or two may have grown after all.
  CHECK_EQUAL(index.bytes() < reserved + reserved / 64, true);
}

}  // namespace
}  // namespace nestpipe

int main() {
  nestpipe::test_random_operations_match_a_map();
  nestpipe::test_extreme_keys();
  nestpipe::test_one_crowded_home_bucket();
  nestpipe::test_failing_memory_changes_nothing_and_all_of_it_returns();
  nestpipe::test_reserved_room_is_enough_and_keeps_what_is_there();
  return nestpipe::failures();
}
