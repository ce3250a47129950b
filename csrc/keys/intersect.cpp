// Intersect: threads put the positions of `a` into one table together, look up `b` in it, and list
// hits in order.
//
// The table is open addressing over 32-bit positions from 1 (0 = empty, so no key value is
// reserved), probed linearly at a load of at most 1/2. A slot is claimed by compare-and-swap;
// afterwards it only ever moves to an earlier position of the same pair. Which slot a pair gets
// depends on the threads, its position does not: the least one.
#include "nestpipe/intersect.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "hash_pair.h"
#include "nestpipe/memory.h"
#include "nestpipe/parallel.h"
#include "nestpipe/request_line.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kGrain = 8192;
constexpr int kBlock = 32;
// A table of several huge pages is worth having them: a probe then rarely misses the TLB.
constexpr std::size_t kOwnPagesFrom = std::size_t{4} << 20;

template <bool kTables>
class PositionTable {
 public:
  explicit PositionTable(const KeyList& list) : list_(list) {
    std::uint64_t capacity = 64;
    while (capacity < 2 * static_cast<std::uint64_t>(list.size)) capacity *= 2;
    mask_ = capacity - 1;
    const std::size_t bytes = capacity * sizeof(std::uint32_t);
    if (bytes >= kOwnPagesFrom) {
      pages_ = Block(&account_, bytes);
      slots_ = static_cast<std::uint32_t*>(pages_.data());
      return;
    }
    small_.reset(new std::uint32_t[capacity]);
    slots_ = small_.get();
    parallel_ranges(static_cast<std::int64_t>(capacity), 8 * kGrain,
                    [this](std::int64_t begin, std::int64_t end) {
                      std::fill(slots_ + begin, slots_ + end, 0u);
                    });
  }

  // Positions begin .. end - 1 of the list. Threads may insert at the same time.
  void insert(std::int64_t begin, std::int64_t end) {
    std::uint64_t home[kBlock];
    for (std::int64_t first = begin; first < end; first += kBlock) {
      const int count = static_cast<int>(std::min<std::int64_t>(end - first, kBlock));
      prefetch<true>(list_, first, count, home);
      for (int i = 0; i < count; ++i) insert_one(first + i, home[i]);
    }
  }

  // out[i] = least position of pair i of `other` in the list, or -1; i = begin .. end - 1. Returns
  // how many are there. All inserts are over.
  std::int64_t find(const KeyList& other, std::int64_t begin, std::int64_t end,
                    std::int32_t* out) const {
    std::uint64_t home[kBlock];
    std::int64_t found = 0;
    for (std::int64_t first = begin; first < end; first += kBlock) {
      const int count = static_cast<int>(std::min<std::int64_t>(end - first, kBlock));
      prefetch<false>(other, first, count, home);
      for (int i = 0; i < count; ++i) {
        const std::int64_t position = static_cast<std::int64_t>(slots_[home[i]]) - 1;
        request_line(&list_.keys[position < 0 ? 0 : position]);
      }
      for (int i = 0; i < count; ++i) {
        std::uint64_t slot = home[i];
        std::uint32_t position = slots_[slot];
        while (position != 0 && !equals(position - 1, other, first + i)) {
          slot = (slot + 1) & mask_;
          position = slots_[slot];
        }
        out[first + i] = static_cast<std::int32_t>(position) - 1;
        found += position != 0;
      }
    }
    return found;
  }

 private:
  bool equals(std::uint32_t position, const KeyList& other, std::int64_t at) const {
    return (list_.keys[position] == other.keys[at]) &
           (!kTables || list_.tables[position] == other.tables[at]);
  }

  // Lines that will only be read stay with all threads.
  template <bool kWrites>
  void prefetch(const KeyList& list, std::int64_t begin, int count, std::uint64_t* home) const {
    for (int i = 0; i < count; ++i) {
      home[i] = hash_pair(list.keys[begin + i], kTables ? list.tables[begin + i] : 0) & mask_;
      kWrites ? request_line_to_write(&slots_[home[i]]) : request_line(&slots_[home[i]]);
    }
  }

  void insert_one(std::int64_t at, std::uint64_t slot) {
    const auto mine = static_cast<std::uint32_t>(at + 1);
    for (;; slot = (slot + 1) & mask_) {
      std::uint32_t seen = __atomic_load_n(&slots_[slot], __ATOMIC_RELAXED);
      if (seen == 0 && claim(slot, &seen, mine)) return;
      if (!equals(seen - 1, list_, at)) continue;
      while (mine < seen && !claim(slot, &seen, mine)) {
      }
      return;
    }
  }

  // Puts `mine` where `*seen` stands; otherwise *seen is what stands there.
  bool claim(std::uint64_t slot, std::uint32_t* seen, std::uint32_t mine) {
    return __atomic_compare_exchange_n(&slots_[slot], seen, mine, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
  }

  const KeyList& list_;
  std::uint64_t mask_;
  MemoryAccount account_;
  Block pages_;
  std::unique_ptr<std::uint32_t[]> small_;
  std::uint32_t* slots_;
};

template <bool kTables>
std::int64_t intersect_lists(const KeyList& a, const KeyList& b, std::int64_t* index_a,
                             std::int64_t* index_b) {
  PositionTable<kTables> table(a);
  parallel_ranges(a.size, kGrain,
                  [&](std::int64_t begin, std::int64_t end) { table.insert(begin, end); });

  const std::unique_ptr<std::int32_t[]> match(new std::int32_t[b.size]);
  const std::int64_t num_tasks = (b.size + kGrain - 1) / kGrain;
  std::vector<std::int64_t> first(num_tasks + 1, 0);  // Of each task's hits in the result.
  parallel_tasks(num_tasks, [&](std::int64_t task) {
    const std::int64_t begin = task * kGrain;
    first[task + 1] = table.find(b, begin, std::min(b.size, begin + kGrain), match.get());
  });
  for (std::int64_t task = 0; task < num_tasks; ++task) first[task + 1] += first[task];
  parallel_tasks(num_tasks, [&](std::int64_t task) {
    std::int64_t hit = first[task];
    const std::int64_t end = std::min(b.size, (task + 1) * kGrain);
    for (std::int64_t i = task * kGrain; i < end; ++i) {
      if (match[i] < 0) continue;
      index_a[hit] = match[i];
      index_b[hit] = i;
      ++hit;
    }
  });
  return first[num_tasks];
}

}  // namespace

std::int64_t intersect(const KeyList& a, const KeyList& b, std::int64_t* index_a,
                       std::int64_t* index_b) {
  if (a.size == 0 || b.size == 0) return 0;
  return a.tables ? intersect_lists<true>(a, b, index_a, index_b)
                  : intersect_lists<false>(a, b, index_a, index_b);
}

}  // namespace nestpipe
