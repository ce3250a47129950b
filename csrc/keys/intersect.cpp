// Intersect: the pairs of `a` go into a set, those of `b` are looked up in parallel, hits are
// listed in order.
#include "nestpipe/intersect.h"

#include <memory>

#include "nestpipe/parallel.h"
#include "pair_set.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kGrain = 8192;

template <bool kTables>
std::int64_t intersect_lists(const KeyList& a, const KeyList& b, std::int64_t* index_a,
                             std::int64_t* index_b) {
  PairSet<kTables> set(a.size);
  const std::unique_ptr<std::int32_t[]> numbers(new std::int32_t[a.size]);
  set.insert(a, {nullptr, nullptr, 0}, numbers.get());

  const std::unique_ptr<std::int32_t[]> match(new std::int32_t[b.size]);
  parallel_ranges(b.size, kGrain, [&](std::int64_t begin, std::int64_t end) {
    set.find(b, begin, end, match.get());
  });
  std::int64_t num_matches = 0;
  for (std::int64_t i = 0; i < b.size; ++i) {
    if (match[i] < 0) continue;
    index_a[num_matches] = set.positions()[match[i]];
    index_b[num_matches] = i;
    ++num_matches;
  }
  return num_matches;
}

}  // namespace

std::int64_t intersect(const KeyList& a, const KeyList& b, std::int64_t* index_a,
                       std::int64_t* index_b) {
  if (a.size == 0 || b.size == 0) return 0;
  return a.tables ? intersect_lists<true>(a, b, index_a, index_b)
                  : intersect_lists<false>(a, b, index_a, index_b);
}

}  // namespace nestpipe
