// Which rows go when a table is full: rules, and exact selection of the lowest ranks.
//
// The rule is written in python/nestpipe_kernels/policy/eviction.py. A row's rank is (first,
// second, hash of its key), compared in this order; hashes of a table's keys differ, so ranks never
// tie and the choice does not depend on where rows lie or on the number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace nestpipe {

enum class EvictionKind : int { kNone = 0, kLru = 1, kLfu = 2, kTtl = 3, kScore = 4 };

struct EvictionRule {
  EvictionKind kind = EvictionKind::kNone;
  std::int64_t keep = 0;      // Rows left, new ones included, after making room in a full table.
  std::int64_t steps = 0;     // kTtl: batches unused after which rows expire.
  std::int64_t interval = 1;  // kTtl: expired rows are looked for at multiples of it.
};

struct EvictionCandidate {
  std::int64_t first;
  std::int64_t second;
  std::uint64_t hash;
  std::uint32_t row;
};

inline bool operator<(const EvictionCandidate& a, const EvictionCandidate& b) {
  if (a.first != b.first) return a.first < b.first;
  if (a.second != b.second) return a.second < b.second;
  return a.hash < b.hash;
}

// Keeps the `wanted` lowest candidates, in the order they are in.
void keep_lowest(std::vector<EvictionCandidate>* candidates, std::int64_t wanted);

// Integers in the order of the doubles, which are not NaN; -0 and +0 are equal.
std::int64_t ordered_bits(double score);

struct ScoreArguments {
  std::int32_t table;
  std::int64_t batch;
  std::vector<std::int64_t> keys;  // By ascending hash.
  std::vector<std::int64_t> last_used;
  std::vector<std::int64_t> frequency;
};

// Writes one score per key, never NaN. May throw. Must not use the store.
using ScoreFunction = std::function<void(const ScoreArguments&, double*)>;

}  // namespace nestpipe
