// The first half of find_or_insert: which keys of a call have rows, and which of the others are the
// same. Nothing of the store changes but counts of this call.
//
// Missing keys are told apart by a chained hash table whose entries are the missing ones
// themselves, as in keys/dedup.cu: chains only grow at their heads, a thread that finds others
// pushed before it walks what they pushed and tries again, so that a pair has one entry. Which one
// depends on luck; that the pair's number follows from its first missing one does not.
#include "device_missing.cuh"
#include "device_rows.cuh"

namespace nestpipe {
namespace cuda {
namespace {

constexpr int kEnd = -1;
constexpr int kNever = 0x7FFFFFFF;

__global__ void search_keys(StoreView store, DeviceKeys in, std::int64_t* handles,
                            MissingKeys missing) {
  const std::int64_t j = global_thread();
  if (j >= in.size) return;
  const std::int32_t table = in.tables[j];
  const bool known = has_table(store, table);
  const std::uint32_t number = known ? find_row(store, in.keys[j], table) : kNoRowNumber;
  handles[j] = number == kNoRowNumber ? -1 : std::int64_t{number};
  missing.flags[j] = known && number == kNoRowNumber ? 1 : 0;
}

// flags: the missing ones before j.
__global__ void list_missing(StoreView store, DeviceKeys in, const std::int64_t* handles,
                             MissingKeys missing) {
  const std::int64_t j = global_thread();
  if (j < store.num_tables) table_state(store, j)->num_new = 0;
  if (store.state->num_missing == 0) return;
  if (j < missing.num_slots) missing.heads[j] = kEnd;
  if (j >= in.size) return;
  missing.first[j] = kNever;
  const std::int32_t table = in.tables[j];
  if (handles[j] < 0 && table >= 0 && table < store.num_tables) {
    missing.position[missing.flags[j]] = static_cast<std::int32_t>(j);
  }
}

__device__ __forceinline__ int find_or_push(const DeviceKeys& in, const MissingKeys& missing,
                                            std::uint64_t hash, int mine) {
  const std::int32_t here = missing.position[mine];
  const std::int64_t key = in.keys[here];
  const std::int32_t table = in.tables[here];
  std::int32_t* const head_address =
      missing.heads + (hash & static_cast<std::uint64_t>(missing.num_slots - 1));
  int head = load_acquire(head_address), walked = kEnd;
  for (;;) {
    for (int entry = head; entry != walked; entry = load_racing(missing.number + entry)) {
      const std::int32_t other = missing.position[entry];
      if (in.keys[other] == key && in.tables[other] == table) return entry;
    }
    store_racing(missing.number + mine, head);
    const int found = swap_if_equal_release(head_address, head, mine);
    if (found == head) return mine;
    walked = head;
    head = found;
  }
}

// Of the lanes of a warp that hold the same pair the first one goes for all.
__global__ void enter_missing(StoreView store, DeviceKeys in, MissingKeys missing) {
  const std::int64_t i = global_thread();
  const bool takes_part = i < store.state->num_missing;
  const unsigned active = __ballot_sync(kAllLanes, takes_part);
  if (!takes_part) return;
  const std::int32_t here = missing.position[i];
  const std::int64_t key = in.keys[here];
  const std::int32_t table = in.tables[here];
  const unsigned same = __match_any_sync(active, static_cast<unsigned long long>(key)) &
                        __match_any_sync(active, table);
  const int leader = __ffs(static_cast<int>(same)) - 1;
  int entry = 0;
  if (static_cast<int>(threadIdx.x % kWarpSize) == leader) {
    const int mine = static_cast<int>(i);
    entry = find_or_push(in, missing, hash_key(store.tables[table].hash, key), mine);
    if (load_racing(missing.first + entry) > mine) atomicMin(missing.first + entry, mine);
  }
  missing.entry[i] = __shfl_sync(active, entry, leader);
}

__device__ __forceinline__ bool is_first(const MissingKeys& missing, std::int64_t i) {
  return missing.first[missing.entry[i]] == i;
}

__global__ void flag_new(StoreView store, std::int64_t size, MissingKeys missing) {
  const std::int64_t i = global_thread();
  if (i >= size) return;
  missing.flags[i] = i < store.state->num_missing && is_first(missing, i) ? 1 : 0;
}

// flags: the new ones before i.
__global__ void number_new(StoreView store, DeviceKeys in, MissingKeys missing) {
  const std::int64_t i = global_thread();
  const bool is_new = i < store.state->num_missing && is_first(missing, i);
  const unsigned active = __ballot_sync(kAllLanes, is_new);
  if (!is_new) return;
  const int number = missing.flags[i];
  missing.new_at[number] = static_cast<std::int32_t>(i);
  missing.number[missing.entry[i]] = number;
  const std::int32_t table = in.tables[missing.position[i]];
  const unsigned same = __match_any_sync(active, table);
  if ((same & lanes_before(threadIdx.x % kWarpSize)) == 0) {
    add(&table_state(store, table)->num_new, __popc(same));
  }
}

}  // namespace

std::size_t store_missing_work_bytes(std::int64_t size) {
  Carve carve(nullptr);
  lay_out_missing(carve, size);
  return carve.used();
}

void store_search_missing(const StoreView& store, const DeviceKeys& in, std::int64_t* handles,
                          void* work, Stream stream) {
  Carve carve(work);
  const MissingKeys missing = lay_out_missing(carve, in.size);
  const unsigned blocks = num_blocks(in.size, kThreads);
  if (in.size > 0) launch(search_keys, blocks, kThreads, 0, stream, store, in, handles, missing);
  exclusive_sum(missing.flags, in.size, missing.scan_work, &store.state->num_missing, stream);
  const std::int64_t most =
      missing.num_slots > store.num_tables ? missing.num_slots : store.num_tables;
  launch(list_missing, num_blocks(most, kThreads), kThreads, 0, stream, store, in, handles,
         missing);
  if (in.size > 0) {
    launch(enter_missing, blocks, kThreads, 0, stream, store, in, missing);
    launch(flag_new, blocks, kThreads, 0, stream, store, in.size, missing);
  }
  exclusive_sum(missing.flags, in.size, missing.scan_work, &store.state->num_new, stream);
  if (in.size > 0) launch(number_new, blocks, kThreads, 0, stream, store, in, missing);
}

}  // namespace cuda
}  // namespace nestpipe
