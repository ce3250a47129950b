// A hash table of the (table, key) pairs of a list in device memory; private to this folder.
//
// Layout. Chained, its entries are positions of the list: heads[slot] is the entry pushed last,
// next[entry] the one pushed before it, -1 the end. Keys stay where they are, so no key is reserved
// for "empty". A pair's entry is the position that got it in first, which depends on luck; first[],
// the smallest position with the pair, does not. The heads take 4 bytes per slot; at most one key
// in a slot on average.
//
// Concurrency. Chains only grow, at their heads. A thread walks a chain, and if its pair is not
// there swaps the head that it started from for itself; if others came before it, it walks what
// they pushed and tries again. So a pair has one entry. A thread's next[] is stored before the swap
// releases it, and read by those who acquired the head.
#pragma once

#include <cstdint>

#include "../cuda/carve.h"
#include "hash_pair.h"
#include "nestpipe/cuda/platform.h"
#include "nestpipe/dedup.h"

namespace nestpipe {
namespace cuda {

constexpr int kEnd = -1;
constexpr int kNever = 0x7FFFFFFF;

struct PairChains {
  std::int32_t* heads;  // [num_slots]
  std::int32_t* next;   // [size]
  std::int32_t* first;  // [size], of entries
  std::int64_t num_slots;
};

inline PairChains take_chains(Carve& carve, std::int64_t size) {
  PairChains chains{};
  chains.num_slots = 1;
  while (chains.num_slots < size) chains.num_slots *= 2;
  chains.heads = carve.take<std::int32_t>(chains.num_slots);
  chains.next = carve.take<std::int32_t>(size);
  chains.first = carve.take<std::int32_t>(size);
  return chains;
}

// What thread i < num_slots has to do before pairs of a list of this size are entered.
__device__ __forceinline__ void clear_chains(const PairChains& chains, std::int64_t i,
                                             std::int64_t size) {
  if (i < chains.num_slots) chains.heads[i] = kEnd;
  if (i < size) chains.first[i] = kNever;
}

__device__ __forceinline__ std::int32_t table_at(const KeyList& list, std::int64_t position) {
  return list.tables == nullptr ? 0 : list.tables[position];
}

__device__ __forceinline__ std::int32_t* head_of(const PairChains& chains, std::int64_t key,
                                                 std::int32_t table) {
  return chains.heads + (hash_pair(key, table) & static_cast<std::uint64_t>(chains.num_slots - 1));
}

// The entry of the pair at `position` of the list, which becomes one if there is none.
__device__ __forceinline__ int find_or_push(const KeyList& list, const PairChains& chains,
                                            int position) {
  const std::int64_t key = list.keys[position];
  const std::int32_t table = table_at(list, position);
  std::int32_t* head_address = head_of(chains, key, table);
  int head = load_acquire(head_address), walked = kEnd;
  for (;;) {
    for (int entry = head; entry != walked; entry = load_racing(chains.next + entry)) {
      if (list.keys[entry] == key && table_at(list, entry) == table) return entry;
    }
    store_racing(chains.next + position, head);
    const int found = swap_if_equal_release(head_address, head, position);
    if (found == head) return position;
    walked = head;
    head = found;
  }
}

// Enters the pairs at the positions of a warp's active lanes, and their positions into first[];
// each lane gets its pair's entry. Of the lanes that hold the same pair the first one, which has
// the smallest position, goes for all.
__device__ __forceinline__ int enter_pair(const KeyList& list, const PairChains& chains,
                                          std::int64_t position, unsigned active) {
  unsigned same = __match_any_sync(active, static_cast<unsigned long long>(list.keys[position]));
  if (list.tables != nullptr) same &= __match_any_sync(active, list.tables[position]);
  const int leader = __ffs(static_cast<int>(same)) - 1;
  int entry = 0;
  if (static_cast<int>(threadIdx.x % kWarpSize) == leader) {
    const int here = static_cast<int>(position);
    entry = find_or_push(list, chains, here);
    if (load_racing(chains.first + entry) > here) atomicMin(chains.first + entry, here);
  }
  return __shfl_sync(active, entry, leader);
}

// The smallest position of `list` with a pair, or -1; once all its pairs have been entered.
__device__ __forceinline__ int first_position(const KeyList& list, const PairChains& chains,
                                              std::int64_t key, std::int32_t table) {
  for (int entry = *head_of(chains, key, table); entry != kEnd; entry = chains.next[entry]) {
    if (list.keys[entry] == key && table_at(list, entry) == table) return chains.first[entry];
  }
  return -1;
}

}  // namespace cuda
}  // namespace nestpipe
