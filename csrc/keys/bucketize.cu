// Bucketize in device memory: a radix sort of positions by bucket, 8 bits a pass, each pass stable.
//
// A pass cuts the list into tiles, counts the digits of each tile, turns the counts into places by
// an exclusive sum in the order (digit, tile), and moves every entry to its place. Inside a tile
// warps own consecutive entries and take them 32 at a time: a lane's place among those of its
// digit is the number of lanes before it with the same digit. Up to 256 buckets take one pass,
// which is the usual case: buckets are ranks.
#include "../cuda/carve.h"
#include "../cuda/scan.cuh"
#include "nestpipe/cuda/bucketize.h"
#include "nestpipe/cuda/platform.h"

namespace nestpipe {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / kWarpSize;
constexpr int kDigits = 256;
constexpr int kDigitBits = 8;
constexpr int kRounds = 8;  // a warp's, 32 entries each
constexpr int kTile = kThreads * kRounds;

struct Entries {
  const std::int32_t* buckets;    // [size]
  const std::int32_t* positions;  // [size]; null: 0, 1, 2, ...
};

struct BucketizeWork {
  std::int32_t* buckets[2];
  std::int32_t* positions[2];
  std::int32_t* places;  // [kDigits, tiles]
  std::int32_t* scan_work;
  std::int64_t* total;
  std::int64_t tiles;
  int passes;
};

int num_passes(std::int64_t num_buckets) {
  int passes = 1;
  while (passes < 4 && num_buckets > std::int64_t{1} << (kDigitBits * passes)) ++passes;
  return passes;
}

BucketizeWork lay_out_bucketize(Carve& carve, std::int64_t size, std::int64_t num_buckets) {
  BucketizeWork work{};
  work.tiles = (size + kTile - 1) / kTile;
  work.passes = num_passes(num_buckets);
  const int buffers = work.passes - 1 < 2 ? work.passes - 1 : 2;
  for (int buffer = 0; buffer < buffers; ++buffer) {
    work.buckets[buffer] = carve.take<std::int32_t>(size);
    work.positions[buffer] = carve.take<std::int32_t>(size);
  }
  work.places = carve.take<std::int32_t>(work.tiles * kDigits);
  work.scan_work = carve.take<std::int32_t>(scan_work_items(work.tiles * kDigits));
  work.total = carve.take<std::int64_t>(1);
  return work;
}

__device__ __forceinline__ unsigned digit_of(std::int32_t bucket, int shift) {
  return static_cast<unsigned>(bucket) >> shift & (kDigits - 1);
}

struct Histogram {
  int counts[kDigits];
};

__global__ void count_digits(const std::int32_t* buckets, std::int64_t size, int shift,
                             std::int64_t tiles, std::int32_t* places) {
  Histogram& histogram = shared_memory<Histogram>();
  store_racing(&histogram.counts[threadIdx.x], 0);
  __syncthreads();
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t i = std::int64_t{blockIdx.x} * kTile + round * kThreads + threadIdx.x;
    if (i < size) atomicAdd(&histogram.counts[digit_of(buckets[i], shift)], 1);
  }
  __syncthreads();
  places[threadIdx.x * tiles + blockIdx.x] = load_racing(&histogram.counts[threadIdx.x]);
}

struct WarpCounts {
  int counts[kWarps][kDigits];  // of a warp's entries so far; then where its first one goes
};

// Of each round: what entry the lane has, and its rank among its warp's entries of the same digit.
__device__ void rank_in_warp(const std::int32_t* buckets, std::int64_t begin, std::int64_t size,
                             int shift, int* counts, int* ranks) {
  const unsigned lane = threadIdx.x % kWarpSize;
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t i = begin + round * kWarpSize + lane;
    const unsigned active = __ballot_sync(kAllLanes, i < size);
    if (i < size) {
      const unsigned digit = digit_of(buckets[i], shift);
      const unsigned same = __match_any_sync(active, digit);
      const int before = load_racing(&counts[digit]);
      ranks[round] = before + __popc(same & lanes_before(lane));
      __syncwarp(active);
      if ((same & lanes_before(lane)) == 0) store_racing(&counts[digit], before + __popc(same));
    }
    __syncwarp();
  }
}

__global__ void place_entries(Entries in, std::int64_t size, int shift, BucketizeWork work,
                              std::int32_t* buckets_out, std::int32_t* positions_out,
                              std::int64_t* order) {
  WarpCounts& shared = shared_memory<WarpCounts>();
  const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int other = 0; other < kWarps; ++other) store_racing(&shared.counts[other][threadIdx.x], 0);
  __syncthreads();
  const std::int64_t begin =
      std::int64_t{blockIdx.x} * kTile + std::int64_t{warp} * kRounds * kWarpSize;
  int ranks[kRounds];
  rank_in_warp(in.buckets, begin, size, shift, shared.counts[warp], ranks);
  __syncthreads();
  int place = work.places[threadIdx.x * work.tiles + blockIdx.x];  // this thread's digit's
  for (int other = 0; other < kWarps; ++other) {
    const int count = load_racing(&shared.counts[other][threadIdx.x]);
    store_racing(&shared.counts[other][threadIdx.x], place);
    place += count;
  }
  __syncthreads();
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t i = begin + round * kWarpSize + lane;
    if (i >= size) continue;
    const std::int32_t bucket = in.buckets[i];
    const int to = load_racing(&shared.counts[warp][digit_of(bucket, shift)]) + ranks[round];
    const std::int64_t position = in.positions == nullptr ? i : in.positions[i];
    if (order != nullptr) {
      order[to] = position;
    } else {
      buckets_out[to] = bucket;
      positions_out[to] = static_cast<std::int32_t>(position);
    }
  }
}

__global__ void clear_counts(std::int64_t num_buckets, BucketizeOutput output) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < num_buckets) output.counts[i] = 0;
  if (i == 0) *output.bad_position = -1;
}

__global__ void count_buckets(const std::int32_t* buckets, std::int64_t size,
                              std::int64_t num_buckets, BucketizeOutput output) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const unsigned active = __ballot_sync(kAllLanes, i < size);
  if (i >= size) return;
  const std::int32_t bucket = buckets[i];
  const unsigned same = __match_any_sync(active, bucket);
  if ((same & lanes_before(threadIdx.x % kWarpSize)) != 0) return;
  if (bucket < 0 || bucket >= num_buckets) {  // -1 is the largest unsigned number
    atomicMin(reinterpret_cast<unsigned long long*>(output.bad_position),
              static_cast<unsigned long long>(i));
  } else {
    atomicAdd(reinterpret_cast<unsigned long long*>(output.counts + bucket),
              static_cast<unsigned long long>(__popc(same)));
  }
}

}  // namespace

std::size_t bucketize_work_bytes(std::int64_t size, std::int64_t num_buckets) {
  Carve carve(nullptr);
  lay_out_bucketize(carve, size, num_buckets);
  return carve.used();
}

void bucketize(const std::int32_t* buckets, std::int64_t size, std::int64_t num_buckets,
               void* work_memory, const BucketizeOutput& output, Stream stream) {
  Carve carve(work_memory);
  const BucketizeWork work = lay_out_bucketize(carve, size, num_buckets);
  const dim3 threads(kThreads);
  launch(clear_counts, num_blocks(num_buckets + 1, kThreads), threads, 0, stream, num_buckets,
         output);
  if (size == 0) return;
  launch(count_buckets, num_blocks(size, kThreads), threads, 0, stream, buckets, size, num_buckets,
         output);
  Entries in = {buckets, nullptr};
  for (int pass = 0; pass < work.passes; ++pass) {
    const bool last = pass == work.passes - 1;
    const int shift = pass * kDigitBits;
    launch(count_digits, num_blocks(size, kTile), threads, sizeof(Histogram), stream, in.buckets,
           size, shift, work.tiles, work.places);
    exclusive_sum(work.places, work.tiles * kDigits, work.scan_work, work.total, stream);
    launch(place_entries, num_blocks(size, kTile), threads, sizeof(WarpCounts), stream, in, size,
           shift, work, work.buckets[pass % 2], work.positions[pass % 2],
           last ? output.order : nullptr);
    in = {work.buckets[pass % 2], work.positions[pass % 2]};
  }
}

}  // namespace cuda
}  // namespace nestpipe
