// Dedup in device memory.
//
// All pairs are entered into one table (pair_chains.cuh), whose first[entry] is the smallest
// position with the pair. Positions that are first are numbered by an exclusive sum over the list,
// hence in order of first appearance.
//
// Floor, bytes a key: 16 (the key, the pair's inverse and entry), and a slot's sector of 32.
#include "../cuda/scan.cuh"
#include "nestpipe/cuda/dedup.h"
#include "pair_chains.cuh"

namespace nestpipe {
namespace cuda {
namespace {

struct DedupWork {
  PairChains chains;          // next becomes the number of the pair once entries are found
  std::int32_t* entry;        // [size], of every position
  std::int32_t* tile_counts;  // [tiles], then the number of first positions before the tile
  std::int32_t* scan_work;
  std::int64_t tiles;
};

DedupWork lay_out_dedup(Carve& carve, std::int64_t size) {
  DedupWork work{};
  work.tiles = scan_work_items(size);
  work.chains = take_chains(carve, size);
  work.entry = carve.take<std::int32_t>(size);
  work.tile_counts = carve.take<std::int32_t>(work.tiles);
  work.scan_work = carve.take<std::int32_t>(scan_work_items(work.tiles));
  return work;
}

__global__ void clear_dedup(DedupWork work, std::int64_t size, std::int64_t* counts) {
  const std::int64_t i = global_thread();
  clear_chains(work.chains, i, size);
  if (i < size) counts[i] = 0;
}

__global__ void find_entries(KeyList input, DedupWork work) {
  const std::int64_t position = global_thread();
  const unsigned active = __ballot_sync(kAllLanes, position < input.size);
  if (position >= input.size) return;
  work.entry[position] = enter_pair(input, work.chains, position, active);
}

__device__ __forceinline__ bool is_first(const DedupWork& work, std::int64_t position) {
  return work.chains.first[work.entry[position]] == position;
}

__global__ void count_first(DedupWork work, std::int64_t size) {
  int count = 0, total = 0;
  for (std::int64_t i = first_item(); i < first_item() + kScanItems && i < size; ++i) {
    count += is_first(work, i) ? 1 : 0;
  }
  block_exclusive_sum(count, shared_memory<ScanShared>(), &total);
  if (threadIdx.x == 0) work.tile_counts[blockIdx.x] = total;
}

__global__ void number_first(DedupWork work, std::int64_t size, std::int64_t* unique_index) {
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
    work.chains.next[work.entry[i]] = number++;
  }
}

__global__ void write_inverse(DedupWork work, std::int64_t size, std::int32_t* inverse,
                              std::int64_t* counts) {
  const std::int64_t i = global_thread();
  const unsigned active = __ballot_sync(kAllLanes, i < size);
  if (i >= size) return;
  const int number = work.chains.next[work.entry[i]];
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
  lay_out_dedup(carve, size);
  return carve.used();
}

void dedup(const KeyList& input, void* work_memory, const DedupOutput& output, Stream stream) {
  Carve carve(work_memory);
  const DedupWork work = lay_out_dedup(carve, input.size);
  const dim3 threads(kThreads), tile_threads(kScanThreads);
  const std::int64_t size = input.size;
  const std::size_t shared = sizeof(ScanShared);
  if (size > 0) {
    const unsigned blocks = num_blocks(size, kThreads), tiles = num_blocks(size, kScanTile);
    launch(clear_dedup, num_blocks(work.chains.num_slots, kThreads), threads, 0, stream, work, size,
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
