// Items of a call in the order of the index shards that their keys fall to, so that each shard is
// handled by one thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "nestpipe/key_index.h"
#include "nestpipe/parallel.h"

namespace nestpipe {

class ByShard {
 public:
  // Items between a request for a cache line and its use.
  static constexpr std::int64_t kAhead = 16;

  // hash_of(i) is the hash of item i's key. placed(place, i) comes once for each item.
  template <typename HashOf>
  void assign(std::uint32_t count, const HashOf& hash_of) {
    assign(count, hash_of, [](std::int64_t, std::uint32_t) {});
  }
  template <typename HashOf, typename Placed>
  void assign(std::uint32_t count, const HashOf& hash_of, const Placed& placed) {
    const std::int64_t parts =
        std::max<std::int64_t>(1, std::min<std::int64_t>(num_threads(), count / kItemsPerTask));
    const auto begin_of = [&](std::int64_t part) {
      return static_cast<std::uint32_t>(count * part / parts);
    };
    items_.reset(new std::uint32_t[count]);
    ends_.assign(kNumShards + 1, 0);
    std::vector<std::int64_t> next(static_cast<std::size_t>(parts * kNumShards), 0);
    parallel_tasks(parts, [&](std::int64_t part) {
      std::int64_t* const counts = next.data() + part * kNumShards;
      for (std::uint32_t i = begin_of(part); i < begin_of(part + 1); ++i) {
        ++counts[shard_of(hash_of(i))];
      }
    });
    std::int64_t offset = 0;
    for (int s = 0; s < kNumShards; ++s) {
      for (std::int64_t part = 0; part < parts; ++part) {
        const std::int64_t in_part = next[part * kNumShards + s];
        next[part * kNumShards + s] = offset;
        offset += in_part;
      }
      ends_[s + 1] = offset;
    }
    parallel_tasks(parts, [&](std::int64_t part) {
      std::int64_t* const to = next.data() + part * kNumShards;
      for (std::uint32_t i = begin_of(part); i < begin_of(part + 1); ++i) {
        const std::int64_t at = to[shard_of(hash_of(i))]++;
        items_[at] = i;
        placed(at, i);
      }
    });
  }

  // Calls visit(i) for all items, those of one shard in ascending order on one thread; early(i)
  // comes 2 * kAhead visits before it, soon(i) kAhead.
  template <typename Early, typename Soon, typename Visit>
  void for_each(const Early& early, const Soon& soon, const Visit& visit) const {
    for_each_range([&](std::int64_t begin, std::int64_t stop) {
      for (std::int64_t at = begin; at < stop; ++at) {
        if (at + 2 * kAhead < stop) early(items_[at + 2 * kAhead]);
        if (at + kAhead < stop) soon(items_[at + kAhead]);
        visit(items_[at]);
      }
    });
  }
  // The same with places in this order instead of items; soon(place) comes kAhead visits earlier.
  template <typename Soon, typename Visit>
  void for_each_place(const Soon& soon, const Visit& visit) const {
    for_each_range([&](std::int64_t begin, std::int64_t stop) {
      for (std::int64_t at = begin; at < stop; ++at) {
        if (at + kAhead < stop) soon(at + kAhead);
        visit(at);
      }
    });
  }
  template <typename Soon, typename Visit>
  void for_each(const Soon& soon, const Visit& visit) const {
    for_each([](std::uint32_t) {}, soon, visit);
  }

 private:
  static constexpr std::int64_t kItemsPerTask = 2048;

  // body(begin, end) for ranges of places that together are all, whole shards each.
  template <typename Body>
  void for_each_range(const Body& body) const {
    if (ends_.empty() || ends_[kNumShards] == 0) return;
    const std::int64_t shards_per_task = kNumShards * kItemsPerTask / ends_[kNumShards] + 1;
    parallel_ranges(kNumShards, shards_per_task,
                    [&](std::int64_t begin, std::int64_t end) { body(ends_[begin], ends_[end]); });
  }

  std::unique_ptr<std::uint32_t[]> items_;
  std::vector<std::int64_t> ends_;  // [kNumShards + 1]
};

}  // namespace nestpipe
