// Dedup: each thread numbers the pairs of its part of the list, then the parts' distinct pairs are
// merged in order.
#include "nestpipe/dedup.h"

#include <memory>
#include <vector>

#include "dedup_radix.h"
#include "nestpipe/parallel.h"
#include "pair_set.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kMinPartSize = 32768;
constexpr std::int64_t kMinRadixSize = std::int64_t{1} << 18;
constexpr std::int64_t kSampleSize = 4096;

KeyList slice(const KeyList& list, std::int64_t begin, std::int64_t end) {
  return {list.keys + begin, list.tables ? list.tables + begin : nullptr, end - begin};
}

template <bool kTables>
std::int64_t dedup_parts(const KeyList& input, std::int64_t* unique_index, std::int32_t* inverse,
                         std::int64_t* counts) {
  using Set = PairSet<kTables>;
  std::int64_t num_parts = input.size / kMinPartSize;
  if (num_parts > num_threads()) num_parts = num_threads();
  if (num_parts < 1) num_parts = 1;
  const auto begin_of = [&](std::int64_t part) { return input.size * part / num_parts; };

  std::vector<std::unique_ptr<Set>> sets(static_cast<std::size_t>(num_parts));
  parallel_tasks(num_parts, [&](std::int64_t part) {
    const std::int64_t begin = begin_of(part), end = begin_of(part + 1);
    // The first part's set takes in all others' pairs.
    sets[part] = std::make_unique<Set>(part == 0 ? input.size : end - begin);
    sets[part]->insert(slice(input, begin, end),
                       {nullptr, nullptr, static_cast<std::uint32_t>(begin)}, inverse + begin);
  });

  // Parts are merged in order of position, so numbers stay in order of first appearance.
  Set& merged = *sets[0];
  std::vector<std::unique_ptr<std::int32_t[]>> number_of(static_cast<std::size_t>(num_parts));
  for (std::int64_t part = 1; part < num_parts; ++part) {
    const Set& set = *sets[part];
    number_of[part].reset(new std::int32_t[set.size() + 1]);
    merged.insert({set.keys(), set.tables(), set.size()}, {set.positions(), set.counts(), 0},
                  number_of[part].get());
  }
  parallel_tasks(num_parts, [&](std::int64_t part) {
    if (part == 0) {
      for (std::int64_t u = 0; u < merged.size(); ++u) {
        unique_index[u] = merged.positions()[u];
        counts[u] = merged.counts()[u];
      }
      return;
    }
    const std::int32_t* number = number_of[part].get();
    const std::int64_t end = begin_of(part + 1);
    for (std::int64_t i = begin_of(part); i < end; ++i) inverse[i] = number[inverse[i]];
  });
  return merged.size();
}

// Whether a long list is mostly distinct, by a sample of runs that are evenly spread. A sample
// repeats less than the list does, so nearly all of it must be distinct.
bool mostly_distinct(const KeyList& input) {
  constexpr std::int64_t kRun = 8;
  std::vector<std::int64_t> keys;
  std::vector<std::int32_t> tables;
  for (std::int64_t i = 0; i < kSampleSize; ++i) {
    const std::int64_t run = i / kRun;
    const std::int64_t at = input.size / (kSampleSize / kRun) * run + i % kRun;
    keys.push_back(input.keys[at]);
    tables.push_back(input.tables ? input.tables[at] : 0);
  }
  PairSet<true> set(kSampleSize);
  std::vector<std::int32_t> numbers(keys.size());
  set.insert({keys.data(), tables.data(), kSampleSize}, {nullptr, nullptr, 0}, numbers.data());
  return set.size() > kSampleSize / 8 * 7;
}

}  // namespace

std::int64_t dedup(const KeyList& input, std::int64_t* unique_index, std::int32_t* inverse,
                   std::int64_t* counts) {
  if (input.size == 0) return 0;
  if (input.size >= kMinRadixSize && mostly_distinct(input)) {
    return dedup_radix(input, unique_index, inverse, counts);
  }
  return input.tables ? dedup_parts<true>(input, unique_index, inverse, counts)
                      : dedup_parts<false>(input, unique_index, inverse, counts);
}

}  // namespace nestpipe
