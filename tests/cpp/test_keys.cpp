// Operations on keys against plain definitions, at several thread counts: for the sanitizers.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "nestpipe/bucketize.h"
#include "nestpipe/cluster.h"
#include "nestpipe/dedup.h"
#include "nestpipe/hash.h"
#include "nestpipe/intersect.h"
#include "nestpipe/owners.h"
#include "nestpipe/parallel.h"

namespace nestpipe {
namespace {

using Pair = std::pair<std::int32_t, std::int64_t>;

struct Keys {
  std::vector<std::int64_t> keys;
  std::vector<std::int32_t> tables;
  KeyList list(bool with_tables) const {
    return {keys.data(), with_tables ? tables.data() : nullptr,
            static_cast<std::int64_t>(keys.size())};
  }
  Pair pair(std::size_t at, bool with_tables) const {
    return {with_tables ? tables[at] : 0, keys[at]};
  }
};

// `distinct` different keys (extremes first) in a mixed order.
Keys make_keys(std::int64_t size, std::uint64_t distinct, std::uint64_t seed) {
  constexpr std::int64_t kLow = std::numeric_limits<std::int64_t>::min();
  const std::vector<std::int64_t> extremes = {0,  -1,   -2,
                                              -5, kLow, std::numeric_limits<std::int64_t>::max()};
  Keys made;
  for (std::int64_t i = 0; i < size; ++i) {
    const std::uint64_t word = mix64(seed + static_cast<std::uint64_t>(i));
    const std::uint64_t which = (word >> 8) % distinct;
    made.keys.push_back(which < extremes.size() ? extremes[which]
                                                : static_cast<std::int64_t>(which << 33));
    made.tables.push_back(static_cast<std::int32_t>(word & 1));
  }
  return made;
}

void test_dedup(const Keys& input, bool with_tables) {
  const std::size_t size = input.keys.size();
  std::vector<std::int64_t> unique_index(size), counts(size);
  std::vector<std::int32_t> inverse(size);
  Dedup found(input.list(with_tables));
  const std::int64_t num_unique = found.size();
  found.write(unique_index.data(), inverse.data(), counts.data());

  std::map<Pair, std::int32_t> numbers;
  std::vector<std::int64_t> expected_index, expected_counts;
  std::vector<std::int32_t> expected_inverse;
  for (std::size_t at = 0; at < size; ++at) {
    const auto [entry, fresh] =
        numbers.emplace(input.pair(at, with_tables), static_cast<std::int32_t>(numbers.size()));
    if (fresh) {
      expected_index.push_back(static_cast<std::int64_t>(at));
      expected_counts.push_back(0);
    }
    ++expected_counts[entry->second];
    expected_inverse.push_back(entry->second);
  }
  unique_index.resize(static_cast<std::size_t>(num_unique));
  counts.resize(static_cast<std::size_t>(num_unique));
  CHECK_EQUAL(unique_index == expected_index, true);
  CHECK_EQUAL(counts == expected_counts, true);
  CHECK_EQUAL(inverse == expected_inverse, true);
}

// Working memory is handed on from call to call, not shared.
void test_dedup_in_two_threads(bool with_tables) {
  const Keys input = make_keys(40000, 9000, 5);
  std::vector<std::int32_t> inverse(input.keys.size()), other(inverse);
  std::vector<std::int64_t> unique_index(inverse.size()), counts(inverse.size());
  std::vector<std::int64_t> other_index(inverse.size()), other_counts(inverse.size());
  std::thread thread([&] {
    for (int i = 0; i < 5; ++i) {
      Dedup(input.list(with_tables)).write(other_index.data(), other.data(), other_counts.data());
    }
  });
  for (int i = 0; i < 5; ++i) {
    Dedup(input.list(with_tables)).write(unique_index.data(), inverse.data(), counts.data());
  }
  thread.join();
  CHECK_EQUAL(inverse == other, true);
}

void test_intersect(const Keys& a, const Keys& b, bool with_tables) {
  std::vector<std::int64_t> index_a(b.keys.size()), index_b(b.keys.size());
  const auto num_matches = static_cast<std::size_t>(
      intersect(a.list(with_tables), b.list(with_tables), index_a.data(), index_b.data()));
  std::map<Pair, std::int64_t> place;
  for (std::size_t at = 0; at < a.keys.size(); ++at) place.emplace(a.pair(at, with_tables), at);
  std::vector<std::int64_t> expected_a, expected_b;
  for (std::size_t at = 0; at < b.keys.size(); ++at) {
    const auto found = place.find(b.pair(at, with_tables));
    if (found == place.end()) continue;
    expected_a.push_back(found->second);
    expected_b.push_back(static_cast<std::int64_t>(at));
  }
  index_a.resize(num_matches);
  index_b.resize(num_matches);
  CHECK_EQUAL(index_a == expected_a, true);
  CHECK_EQUAL(index_b == expected_b, true);
}

void test_bucketize(std::int64_t size, std::int64_t num_buckets) {
  std::vector<std::int32_t> buckets(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) {
    buckets[i] = static_cast<std::int32_t>(mix64(i) % static_cast<std::uint64_t>(num_buckets));
  }
  std::vector<std::int64_t> order(buckets.size()), counts(static_cast<std::size_t>(num_buckets));
  CHECK_EQUAL(bucketize(buckets.data(), size, num_buckets, order.data(), counts.data()), -1);
  std::vector<std::int64_t> expected(buckets.size());
  std::iota(expected.begin(), expected.end(), 0);
  std::stable_sort(expected.begin(), expected.end(),
                   [&](std::int64_t a, std::int64_t b) { return buckets[a] < buckets[b]; });
  CHECK_EQUAL(order == expected, true);
  CHECK_EQUAL(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), size);
  if (size < 2) return;
  buckets[size - 1] = static_cast<std::int32_t>(num_buckets);
  buckets[size / 2] = -1;
  CHECK_EQUAL(bucketize(buckets.data(), size, num_buckets, order.data(), counts.data()), size / 2);
}

void test_owners(std::int64_t size) {
  Keys input = make_keys(size, 1 << 20, 3);
  const std::vector<std::int64_t> table_hashes = {17, -99};
  std::vector<std::int32_t> slice_owner(kNumSlices), got(input.keys.size());
  for (int slice = 0; slice < kNumSlices; ++slice) slice_owner[slice] = slice % 7;
  const auto run = [&] {
    return owners(input.list(true), table_hashes.data(), 2, slice_owner.data(), got.data());
  };
  CHECK_EQUAL(run(), -1);
  for (std::size_t at = 0; at < got.size(); ++at) {
    const auto table_hash = static_cast<std::uint64_t>(table_hashes[input.tables[at]]);
    if (got[at] == slice_owner[slice_of(hash_key(table_hash, input.keys[at]))]) continue;
    CHECK_EQUAL(at, got.size());
    return;
  }
  if (size == 0) return;
  input.tables[size - 1] = 2;
  input.tables[size / 2] = -1;
  CHECK_EQUAL(run(), size / 2);
}

// Orders must be permutations that repeat exactly.
void test_cluster(std::int64_t num_samples, std::int64_t num_parts, ClusterObjective objective) {
  std::vector<std::int64_t> offsets = {0};
  std::vector<std::int32_t> ids;
  for (std::int64_t s = 0; s < num_samples; ++s) {
    for (std::uint64_t i = 0; i < 1 + mix64(s) % 9; ++i) {
      ids.push_back(static_cast<std::int32_t>(mix64(mix64(s) + i) % 101));
    }
    offsets.push_back(static_cast<std::int64_t>(ids.size()));
  }
  const ClusterProblem problem = {offsets.data(), ids.data(), num_samples, 101, num_parts};
  std::vector<std::int64_t> order(static_cast<std::size_t>(num_samples)), again(order);
  cluster(problem, objective, 11, order.data());
  cluster(problem, objective, 11, again.data());
  CHECK_EQUAL(order == again, true);
  std::sort(order.begin(), order.end());
  for (std::int64_t s = 0; s < num_samples; ++s) {
    if (order[s] != s) CHECK_EQUAL(order[s], s);
  }
}

void run_all() {
  for (const int threads : {1, 2, 4}) {
    set_num_threads(threads);
    for (const bool with_tables : {false, true}) {
      for (const std::int64_t size : {0, 1, 63, 1000, 150000}) {
        for (const std::uint64_t distinct : {1, 6, 40, 70000, 1 << 26}) {
          test_dedup(make_keys(size, distinct, 1), with_tables);
        }
      }
      test_dedup(make_keys(300000, 1 << 26, 1), with_tables);  // long and mostly distinct
      test_dedup_in_two_threads(with_tables);
      test_intersect(make_keys(60000, 1 << 17, 1), make_keys(60000, 1 << 17, 2), with_tables);
      test_intersect(make_keys(0, 1, 1), make_keys(5, 3, 2), with_tables);
      test_intersect(make_keys(5, 3, 1), make_keys(0, 1, 2), with_tables);
    }
    for (const std::int64_t size : {0, 1, 63, 100000}) {
      test_owners(size);
      for (const std::int64_t num_buckets : {1, 8, 150000}) test_bucketize(size, num_buckets);
    }
  }
  for (const auto objective : {ClusterObjective::kSendOnce, ClusterObjective::kResend}) {
    for (const std::int64_t num_samples : {0, 1, 5, 100}) {
      for (const std::int64_t num_parts : {1, 2, 3, 8, 63, 64, 65, 200}) {
        test_cluster(num_samples, num_parts, objective);
      }
    }
  }
}

}  // namespace
}  // namespace nestpipe

int main() {
  nestpipe::run_all();
  return nestpipe::failures();
}
