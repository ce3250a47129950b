// Items of a call in the order of the index shards that their keys fall to, so that each shard is
// handled by one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "nestpipe/key_index.h"
#include "nestpipe/parallel.h"

namespace nestpipe {

class ByShard {
 public:
  // Items between a request for a cache line and its use.
  static constexpr std::int64_t kAhead = 16;

  // hash_of(i) is the hash of item i's key.
  template <typename HashOf>
  void assign(std::uint32_t count, const HashOf& hash_of) {
    items_.resize(count);
    ends_.assign(kNumShards + 1, 0);
    for (std::uint32_t i = 0; i < count; ++i) ++ends_[shard_of(hash_of(i)) + 1];
    for (int s = 0; s < kNumShards; ++s) ends_[s + 1] += ends_[s];
    std::vector<std::int64_t> next(ends_.begin(), ends_.end() - 1);
    for (std::uint32_t i = 0; i < count; ++i) items_[next[shard_of(hash_of(i))]++] = i;
  }

  // Calls visit(i) for all items, those of one shard in ascending order on one thread; early(i)
  // comes 2 * kAhead visits before it, soon(i) kAhead.
  template <typename Early, typename Soon, typename Visit>
  void for_each(const Early& early, const Soon& soon, const Visit& visit) const {
    constexpr std::int64_t kItemsPerTask = 2048;
    const auto count = static_cast<std::int64_t>(items_.size());
    if (count == 0) return;
    const std::int64_t shards_per_task = kNumShards * kItemsPerTask / count + 1;
    parallel_ranges(kNumShards, shards_per_task, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t stop = ends_[end];
      for (std::int64_t at = ends_[begin]; at < stop; ++at) {
        if (at + 2 * kAhead < stop) early(items_[at + 2 * kAhead]);
        if (at + kAhead < stop) soon(items_[at + kAhead]);
        visit(items_[at]);
      }
    });
  }
  template <typename Soon, typename Visit>
  void for_each(const Soon& soon, const Visit& visit) const {
    for_each([](std::uint32_t) {}, soon, visit);
  }

 private:
  std::vector<std::uint32_t> items_;
  std::vector<std::int64_t> ends_;  // [kNumShards + 1]
};

}  // namespace nestpipe
