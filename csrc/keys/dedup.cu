// Dedup in device memory.
//
// Layout. A chained hash table whose entries are positions of the input: heads[slot] is the entry
// pushed last, next[entry] the one pushed before it, -1 the end. Keys stay where they are, so no
// key is reserved for "empty". A pair's entry is the position that got it in first, which depends
// on luck; what comes out does not.
//
// Concurrency. Chains only grow, at their heads. A thread walks a chain, and if its pair is not
// there swaps the head that it started from for itself; if others came before it, it walks what
// they pushed and tries again. So a pair has one entry. A thread's next[] is stored before the swap
// releases it, and read by those who acquired the head.
//
// Numbers. first[entry] is the smallest position with the pair. Positions that are first are
// numbered by an exclusive sum over the list, hence in order of first appearance. The heads take
// 4 bytes per slot; at most one key in a slot on average.
#include "../cuda/carve.h"
#include "../cuda/scan.cuh"
#include "hash_pair.h"
#include "nestpipe/cuda/dedup.h"
#include "nestpipe/cuda/platform.h"

namespace nestpipe {
namespace cuda {
namespace {

constexpr int kEnd = -1;
constexpr int kNever = 0x7FFFFFFF;
constexpr int kThreads = 256;

struct Work {
  std::int32_t* heads;        // [num_slots]
  std::int32_t* next;         // [size]; the number of the pair once entries are found
  std::int32_t* first;        // [size], of entries
  std::int32_t* entry;        // [size], of every position
  std::int32_t* tile_counts;  // [tiles], then the number of first positions before the tile
  std::int32_t* scan_work;
  std::int64_t num_slots, tiles;
};

Work lay_out(Carve& carve, std::int64_t size) {
  Work work{};
  work.num_slots = 1;
  while (work.num_slots < size) work.num_slots *= 2;
  work.tiles = scan_work_items(size);
  work.heads = carve.take<std::int32_t>(work.num_slots);
  work.next = carve.take<std::int32_t>(size);
  work.first = carve.take<std::int32_t>(size);
  work.entry = carve.take<std::int32_t>(size);
  work.tile_counts = carve.take<std::int32_t>(work.tiles);
  work.scan_work = carve.take<std::int32_t>(scan_work_items(work.tiles));
  return work;
}

__device__ __forceinline__ std::int64_t global_thread() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

__global__ void clear(Work work, std::int64_t size, std::int64_t* counts) {
  const std::int64_t i = global_thread();
  if (i < work.num_slots) work.heads[i] = kEnd;
  if (i >= size) return;
  work.first[i] = kNever;
  counts[i] = 0;
}

__device__ __forceinline__ std::int32_t table_at(const KeyList& input, std::int64_t position) {
  return input.tables == nullptr ? 0 : input.tables[position];
}

// The entry of the pair at `position`, which becomes one if there is none.
__device__ int find_or_push(const KeyList& input, const Work& work, int position) {
  const std::int64_t key = input.keys[position];
  const std::int32_t table = table_at(input, position);
  const auto slots_mask = static_cast<std::uint64_t>(work.num_slots - 1);
  std::int32_t* head_address = work.heads + (hash_pair(key, table) & slots_mask);
  int head = load_acquire(head_address), walked = kEnd;
  for (;;) {
    for (int entry = head; entry != walked; entry = load_racing(work.next + entry)) {
      if (input.keys[entry] == key && table_at(input, entry) == table) return entry;
    }
    store_racing(work.next + position, head);
    const int found = swap_if_equal_release(head_address, head, position);
    if (found == head) return position;
    walked = head;
    head = found;
  }
}

// Of the lanes of a warp that hold the same pair the first one, which has the smallest position,
// goes for all.
__global__ void find_entries(KeyList input, Work work) {
  const std::int64_t position = global_thread();
  const unsigned active = __ballot_sync(kAllLanes, position < input.size);
  if (position >= input.size) return;
  const unsigned lane = threadIdx.x % kWarpSize;
  unsigned same = __match_any_sync(active, static_cast<unsigned long long>(input.keys[position]));
  if (input.tables != nullptr) same &= __match_any_sync(active, input.tables[position]);
  const int leader = __ffs(static_cast<int>(same)) - 1;
  int entry = 0;
  if (static_cast<int>(lane) == leader) {
    const int here = static_cast<int>(position);
    entry = find_or_push(input, work, here);
    if (load_racing(work.first + entry) > here) atomicMin(work.first + entry, here);
  }
  work.entry[position] = __shfl_sync(active, entry, leader);
}

__device__ __forceinline__ std::int64_t first_item() {
  return std::int64_t{blockIdx.x} * kScanTile + std::int64_t{threadIdx.x} * kScanItems;
}

__device__ __forceinline__ bool is_first(const Work& work, std::int64_t position) {
  return work.first[work.entry[position]] == position;
}

__global__ void count_first(Work work, std::int64_t size) {
  int count = 0, total = 0;
  for (std::int64_t i = first_item(); i < first_item() + kScanItems && i < size; ++i) {
    count += is_first(work, i) ? 1 : 0;
  }
  block_exclusive_sum(count, shared_memory<ScanShared>(), &total);
  if (threadIdx.x == 0) work.tile_counts[blockIdx.x] = total;
}

__global__ void number_first(Work work, std::int64_t size, std::int64_t* unique_index) {
  unsigned marks = 0;
  int total = 0;
  for (int k = 0; k < kScanItems; ++k) {
    const std::int64_t i = first_item() + k;
    if (i < size && is_first(work, i)) marks |= 1u << k;
  }
  int number = work.tile_counts[blockIdx.x] +
               block_exclusive_sum(__popc(marks), shared_memory<ScanShared>(), &total);
  for (int k = 0; k < kScanItems; ++k) {
    if ((marks >> k & 1u) == 0) continue;
    const std::int64_t i = first_item() + k;
    unique_index[number] = i;
    work.next[work.entry[i]] = number++;
  }
}

__global__ void write_inverse(Work work, std::int64_t size, std::int32_t* inverse,
                              std::int64_t* counts) {
  const std::int64_t i = global_thread();
  const unsigned active = __ballot_sync(kAllLanes, i < size);
  if (i >= size) return;
  const int number = work.next[work.entry[i]];
  inverse[i] = number;
  const unsigned same = __match_any_sync(active, number);
  if ((same & lanes_before(threadIdx.x % kWarpSize)) == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counts + number),
              static_cast<unsigned long long>(__popc(same)));
  }
}

}  // namespace

std::size_t dedup_work_bytes(std::int64_t size) {
  Carve carve(nullptr);
  lay_out(carve, size);
  return carve.used();
}

void dedup(const KeyList& input, void* work_memory, const DedupOutput& output, Stream stream) {
  Carve carve(work_memory);
  const Work work = lay_out(carve, input.size);
  const dim3 threads(kThreads), tile_threads(kScanThreads);
  const std::int64_t size = input.size;
  const std::size_t shared = sizeof(ScanShared);
  if (size > 0) {
    const unsigned blocks = num_blocks(size, kThreads), tiles = num_blocks(size, kScanTile);
    launch(clear, num_blocks(work.num_slots, kThreads), threads, 0, stream, work, size,
           output.counts);
    launch(find_entries, blocks, threads, 0, stream, input, work);
    launch(count_first, tiles, tile_threads, shared, stream, work, size);
    exclusive_sum(work.tile_counts, work.tiles, work.scan_work, output.num_unique, stream);
    launch(number_first, tiles, tile_threads, shared, stream, work, size, output.unique_index);
    launch(write_inverse, blocks, threads, 0, stream, work, size, output.inverse, output.counts);
  } else {
    exclusive_sum(work.tile_counts, 0, work.scan_work, output.num_unique, stream);
  }
}

}  // namespace cuda
}  // namespace nestpipe
