// Gradients of rows, summed in the written order (docs/architecture.md, rule 3), in device memory.
//
// Occurrences are sorted by row, stably, and each becomes a source: where the gradient of its bag
// is, and what it is multiplied with or divided by. A few lanes then add up a row's sources, each
// lane its own elements. Rows with more than one block of occurrences are hot: their blocks are
// summed first, all at the same time, into memory of their own, and the row adds up those.
//
// Floor, bytes an occurrence: 4 * dim of gradient, and about 80 for sorting (one 8-bit pass; 40
// more for each further one) and its source; a row that occurs: 8 * dim.
#include "../cuda/carve.h"
#include "../cuda/row_lanes.cuh"
#include "../cuda/row_units.cuh"
#include "../cuda/scan.cuh"
#include "bag_checks.h"
#include "device_bags.cuh"
#include "nestpipe/cuda/bucketize.h"
#include "nestpipe/row_storage.h"

namespace nestpipe {
namespace cuda {
namespace {

constexpr int kSourcesAtOnce = 4;  // read before they are added
constexpr std::int32_t kTimes = -1, kOver = -2;

// What an occurrence adds to its row's gradient.
struct alignas(16) Source {
  const float* grad;    // null: 0
  float factor;         // of a maximum: the bits of the occurrence's position
  std::int32_t maxima;  // kTimes, kOver, or the bag's line in the table of winners
};

struct BackwardWork {
  std::int32_t* buckets;     // [n]
  std::int32_t* bag_of;      // [n]
  std::int64_t* order;       // [n]
  std::int64_t* counts;      // [num_rows + 1], the last one of what has no row
  std::int32_t* starts;      // [num_rows + 1], of a row's sources
  std::int32_t* hot;         // [num_rows + 1], of a row's blocks
  std::int32_t* bag_counts;  // [num_bags], where there are means
  std::int32_t* winners;     // [num_maxima, dim], positions
  Source* sources;           // [n]
  float* block_sums;         // [most_hot, dim]
  std::int32_t* scan_work;
  std::int64_t* total;   // [2], of scans
  std::int64_t* unused;  // [1]
  unsigned char* bucketize_work;
  std::int64_t most_hot;  // blocks: a row with more than one has fewer than two for each 1,024
};

BackwardWork lay_out_backward(Carve& carve, const PoolBags& bags, std::int64_t num_rows,
                              std::int64_t dim) {
  const std::int64_t n = bags.num_occurrences;
  BackwardWork work{};
  work.most_hot = 2 * n / kGradientBlock;
  work.buckets = carve.take<std::int32_t>(n);
  work.bag_of = carve.take<std::int32_t>(n);
  work.order = carve.take<std::int64_t>(n);
  work.counts = carve.take<std::int64_t>(num_rows + 1);
  work.starts = carve.take<std::int32_t>(num_rows + 1);
  work.hot = carve.take<std::int32_t>(num_rows + 1);
  work.bag_counts = carve.take<std::int32_t>(bags.has_means ? bags.num_bags : 0);
  work.winners = carve.take<std::int32_t>(bags.num_maxima * dim);
  work.sources = carve.take<Source>(n);
  work.block_sums = carve.take<float>(work.most_hot * dim);
  work.scan_work = carve.take<std::int32_t>(scan_work_items(num_rows + 1));
  work.total = carve.take<std::int64_t>(2);
  work.unused = carve.take<std::int64_t>(1);
  work.bucketize_work =
      carve.take<unsigned char>(static_cast<std::int64_t>(bucketize_work_bytes(n, num_rows + 1)));
  return work;
}

__global__ void clear_bag_counts(std::int32_t* counts, std::int64_t size) {
  if (global_thread() < size) counts[global_thread()] = 0;
}

// The bucket of each occurrence, its bag, and how many occurrences bags have without padding.
__global__ void find_bags(PoolBags bags, std::int64_t num_rows, BackwardWork work,
                          std::int64_t* bad_position) {
  const std::int64_t j = global_thread();
  const unsigned active = __ballot_sync(kAllLanes, j < bags.num_occurrences);
  if (j >= bags.num_occurrences) return;
  const std::int64_t slot = slot_of(bags, j, num_rows, true, bad_position);
  const auto bag = static_cast<std::int32_t>(bag_of(bags, j));
  work.buckets[j] = static_cast<std::int32_t>(slot < 0 ? num_rows : slot);
  work.bag_of[j] = bag;
  if (!bags.has_means) return;
  const unsigned valid = __ballot_sync(active, slot >= 0) & active;
  const unsigned same = __match_any_sync(active, bag) & valid;
  if (slot < 0 || (same & lanes_before(threadIdx.x % kWarpSize)) != 0) return;
  atomicAdd(work.bag_counts + bag, __popc(same));
}

__global__ void cut_rows(BackwardWork work, std::int64_t num_rows) {
  const std::int64_t u = global_thread();
  if (u > num_rows) return;
  const std::int64_t count = work.counts[u];
  const bool is_hot = u < num_rows && count > kGradientBlock;
  work.starts[u] = static_cast<std::int32_t>(count);
  work.hot[u] =
      is_hot ? static_cast<std::int32_t>((count + kGradientBlock - 1) / kGradientBlock) : 0;
}

// Which occurrence supplied each element of a bag's maximum.
template <int kWidth>
__global__ void find_winners(RowMatrix rows, PoolBags bags, BackwardWork work) {
  const std::int64_t bag = chosen_position();
  if (bag >= bags.num_bags) return;
  const PoolSegment segment = segment_of(bags, bag);
  if (!has_mode(segment, PoolMode::kMax) || segment.matrix == nullptr) return;
  const std::int64_t line = segment.first_maxima + bag - segment.first_bag;
  for (std::int64_t unit = threadIdx.x; unit < rows.dim / kWidth; unit += blockDim.x) {
    float maxima[kWidth] = {};
    std::int32_t who[kWidth];
    for (int k = 0; k < kWidth; ++k) who[k] = -1;
    for (std::int64_t j = bags.bag_offsets[bag]; j < bags.bag_offsets[bag + 1]; ++j) {
      const std::int64_t slot = slot_of(bags, j, rows.num_rows, false, nullptr);
      if (slot < 0) continue;
      float values[kWidth];
      load_unit<kWidth>(rows.data + slot * rows.stride, unit, values);
      for (int k = 0; k < kWidth; ++k) {
        if (who[k] >= 0 && !beats_maximum(values[k], maxima[k])) continue;
        maxima[k] = values[k];
        who[k] = static_cast<std::int32_t>(j);
      }
    }
    for (int k = 0; k < kWidth; ++k) work.winners[line * rows.dim + unit * kWidth + k] = who[k];
  }
}

__global__ void make_sources(PoolBags bags, std::int64_t num_rows, BackwardWork work) {
  const std::int64_t i = global_thread();
  if (i >= bags.num_occurrences || i >= work.starts[num_rows]) return;
  const std::int64_t j = work.order[i];
  const std::int64_t bag = work.bag_of[j];
  const PoolSegment segment = segment_of(bags, bag);
  Source source = {nullptr, 1.0f, kTimes};
  if (segment.matrix != nullptr) {
    source.grad = segment.matrix + (bag - segment.first_bag) * segment.stride;
    if (has_mode(segment, PoolMode::kMean)) {
      source.factor = static_cast<float>(work.bag_counts[bag]);
      source.maxima = kOver;
    } else if (has_mode(segment, PoolMode::kMax)) {
      source.factor = bits_float(static_cast<std::uint32_t>(j));
      source.maxima = static_cast<std::int32_t>(segment.first_maxima + bag - segment.first_bag);
    } else if (bags.weights != nullptr) {
      source.factor = bags.weights[j];
    }
  }
  work.sources[i] = source;
}

template <int kWidth>
__device__ __forceinline__ void add_source(const BackwardWork& work, const Source& source,
                                           const float* values, std::int64_t at, std::int64_t dim,
                                           float* sum) {
  if (source.maxima >= 0) {
    const std::int32_t* who = work.winners + source.maxima * dim + at;
    const auto position = static_cast<std::int32_t>(float_bits(source.factor));
    for (int k = 0; k < kWidth; ++k) sum[k] += who[k] == position ? values[k] : 0.0f;
  } else if (source.maxima == kOver) {
    for (int k = 0; k < kWidth; ++k) sum[k] += values[k] / source.factor;
  } else {
    for (int k = 0; k < kWidth; ++k) sum[k] += source.factor * values[k];
  }
}

// Adds sources [begin, end) to a unit of a sum that began at +0.0, so that adding +0.0 changes
// nothing: what is 0, and what is beyond the end.
template <int kWidth>
__device__ __forceinline__ void add_sources(const BackwardWork& work, std::int64_t begin,
                                            std::int64_t end, std::int64_t unit, std::int64_t dim,
                                            float* sum) {
  for (std::int64_t i = begin; i < end; i += kSourcesAtOnce) {
    Source sources[kSourcesAtOnce];
    float values[kSourcesAtOnce][kWidth] = {};
    for (int b = 0; b < kSourcesAtOnce; ++b) {
      sources[b] = i + b < end ? work.sources[i + b] : Source{nullptr, 1.0f, kTimes};
    }
    for (int b = 0; b < kSourcesAtOnce; ++b) {
      if (sources[b].grad != nullptr) load_unit<kWidth>(sources[b].grad, unit, values[b]);
    }
    for (int b = 0; b < kSourcesAtOnce; ++b) {
      add_source<kWidth>(work, sources[b], values[b], unit * kWidth, dim, sum);
    }
  }
}

// One block of a hot row for each group of lanes.
template <int kWidth>
__global__ void sum_hot_blocks(BackwardWork work, std::int64_t num_rows, std::int64_t dim) {
  const std::int64_t block = chosen_position();
  if (block >= work.hot[num_rows]) return;
  const std::int64_t u =
      last_from(num_rows, block, [&](std::int64_t row) { return work.hot[row]; });
  const std::int64_t first = work.starts[u];
  const std::int64_t begin = first + (block - work.hot[u]) * kGradientBlock;
  const std::int64_t last = first + work.counts[u];
  const std::int64_t end = begin + kGradientBlock < last ? begin + kGradientBlock : last;
  for (std::int64_t unit = threadIdx.x; unit < dim / kWidth; unit += blockDim.x) {
    float sum[kWidth] = {};
    add_sources<kWidth>(work, begin, end, unit, dim, sum);
    store_unit<kWidth>(work.block_sums + block * dim, unit, sum);
  }
}

template <int kWidth>
__global__ void add_rows(BackwardWork work, std::int64_t num_rows, std::int64_t dim,
                         float* accumulator) {
  const std::int64_t u = chosen_position();
  if (u >= num_rows || work.counts[u] == 0) return;
  const std::int64_t begin = work.starts[u], end = begin + work.counts[u];
  float* const target = accumulator + u * dim;
  for (std::int64_t unit = threadIdx.x; unit < dim / kWidth; unit += blockDim.x) {
    float sum[kWidth] = {}, before[kWidth];
    if (work.counts[u] <= kGradientBlock) {
      add_sources<kWidth>(work, begin, end, unit, dim, sum);
    } else {
      for (std::int64_t block = work.hot[u]; block < work.hot[u + 1]; ++block) {
        float part[kWidth];
        load_unit<kWidth>(work.block_sums + block * dim, unit, part);
        for (int k = 0; k < kWidth; ++k) sum[k] += part[k];
      }
    }
    load_unit<kWidth>(target, unit, before);
    for (int k = 0; k < kWidth; ++k) sum[k] += before[k];
    store_unit<kWidth>(target, unit, sum);
  }
}

}  // namespace

std::size_t lookup_pool_backward_work_bytes(const PoolBags& bags, std::int64_t num_rows,
                                            std::int64_t dim) {
  Carve carve(nullptr);
  lay_out_backward(carve, bags, num_rows, dim);
  return carve.used();
}

void lookup_pool_backward(const RowMatrix& rows, const PoolBags& bags, void* work_memory,
                          float* accumulator, std::int64_t* bad_position, Stream stream) {
  const std::int64_t n = bags.num_occurrences, num_rows = rows.num_rows, dim = rows.dim;
  if (n == 0 || dim == 0) return;
  Carve carve(work_memory);
  const BackwardWork work = lay_out_backward(carve, bags, num_rows, dim);
  const dim3 threads(kThreads);
  if (bags.has_means) {
    launch(clear_bag_counts, num_blocks(bags.num_bags, kThreads), threads, 0, stream,
           work.bag_counts, bags.num_bags);
  }
  launch(find_bags, num_blocks(n, kThreads), threads, 0, stream, bags, num_rows, work,
         bad_position);
  bucketize(work.buckets, n, num_rows + 1, work.bucketize_work,
            {work.order, work.counts, work.unused}, stream);
  launch(cut_rows, num_blocks(num_rows + 1, kThreads), threads, 0, stream, work, num_rows);
  exclusive_sum(work.starts, num_rows + 1, work.scan_work, work.total, stream);
  exclusive_sum(work.hot, num_rows + 1, work.scan_work, work.total + 1, stream);
  if (bags.num_maxima > 0) {
    const bool wide = dim % kFloatsPerVector == 0 && aligned_16(rows.data, rows.stride);
    const dim3 lanes = row_block(wide ? dim / kFloatsPerVector : dim);
    launch(wide ? find_winners<4> : find_winners<1>, num_blocks(bags.num_bags, lanes.y), lanes, 0,
           stream, rows, bags, work);
  }
  launch(make_sources, num_blocks(n, kThreads), threads, 0, stream, bags, num_rows, work);
  const bool wide = bags.aligned && aligned_16(accumulator, dim);
  const dim3 lanes = row_block(wide ? dim / kFloatsPerVector : dim);
  if (work.most_hot > 0) {
    launch(wide ? sum_hot_blocks<4> : sum_hot_blocks<1>, num_blocks(work.most_hot, lanes.y), lanes,
           0, stream, work, num_rows, dim);
  }
  if (num_rows > 0) {
    launch(wide ? add_rows<4> : add_rows<1>, num_blocks(num_rows, lanes.y), lanes, 0, stream, work,
           num_rows, dim, accumulator);
  }
}

}  // namespace cuda
}  // namespace nestpipe
