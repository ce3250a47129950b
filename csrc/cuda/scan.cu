// Exclusive sums of an array: sums of tiles, their sums by one block, then each tile again.
#include "scan.cuh"

namespace nestpipe {
namespace cuda {
namespace {

__global__ void sum_tiles(const std::int32_t* values, std::int64_t size, std::int32_t* sums) {
  int sum = 0, total = 0;
  for (std::int64_t i = first_item(); i < first_item() + kScanItems; ++i) {
    if (i < size) sum += values[i];
  }
  block_exclusive_sum(sum, shared_memory<ScanShared>(), &total);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

__global__ void scan_sums(std::int32_t* sums, std::int64_t num_sums, std::int64_t* total) {
  int before = 0;
  for (std::int64_t begin = 0; begin < num_sums; begin += kScanThreads) {
    const std::int64_t i = begin + threadIdx.x;
    int sum_of_round = 0;
    const int here =
        block_exclusive_sum(i < num_sums ? sums[i] : 0, shared_memory<ScanShared>(), &sum_of_round);
    if (i < num_sums) sums[i] = before + here;
    before += sum_of_round;
  }
  if (threadIdx.x == 0) *total = before;
}

__global__ void scan_tiles(std::int32_t* values, std::int64_t size, const std::int32_t* sums) {
  int items[kScanItems], sum = 0, total = 0;
  for (int k = 0; k < kScanItems; ++k) {
    const std::int64_t i = first_item() + k;
    items[k] = i < size ? values[i] : 0;
    sum += items[k];
  }
  int before = sums[blockIdx.x] + block_exclusive_sum(sum, shared_memory<ScanShared>(), &total);
  for (int k = 0; k < kScanItems; ++k) {
    const std::int64_t i = first_item() + k;
    if (i < size) values[i] = before;
    before += items[k];
  }
}

}  // namespace

void exclusive_sum(std::int32_t* values, std::int64_t size, std::int32_t* work, std::int64_t* total,
                   Stream stream) {
  const std::int64_t tiles = scan_work_items(size);
  const dim3 threads(kScanThreads);
  const std::size_t shared = sizeof(ScanShared);
  if (tiles > 0)
    launch(sum_tiles, num_blocks(size, kScanTile), threads, shared, stream, values, size, work);
  launch(scan_sums, 1, threads, shared, stream, work, tiles, total);
  if (tiles > 0)
    launch(scan_tiles, num_blocks(size, kScanTile), threads, shared, stream, values, size, work);
}

}  // namespace cuda
}  // namespace nestpipe
