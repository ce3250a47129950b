// Pooled rows of bags, and gradients of per-sample weights, in device memory: a few lanes a bag (or
// an occurrence), each lane its own elements, in bag order.
//
// Floor, bytes an occurrence: 4 * dim and its slot; a bag: 4 * dim and 8.
#include "../cuda/row_lanes.cuh"
#include "../cuda/row_units.cuh"
#include "bag_checks.h"
#include "device_bags.cuh"

namespace nestpipe {
namespace cuda {
namespace {

constexpr int kRowsAtOnce = 8;  // read before they are added

// The pooled elements of a unit of a bag.
template <int kWidth>
struct Pooled {
  float values[kWidth] = {};
  std::int64_t count = 0;

  __device__ __forceinline__ void add(const PoolSegment& segment, const float* row) {
    const bool replaces = has_mode(segment, PoolMode::kNone);
    const bool is_maximum = has_mode(segment, PoolMode::kMax);
    for (int k = 0; k < kWidth; ++k) {
      if (!replaces && !is_maximum) {
        values[k] += row[k];
      } else if (replaces || count == 0 || beats_maximum(row[k], values[k])) {
        values[k] = row[k];
      }
    }
    ++count;
  }
};

template <int kWidth>
__device__ __forceinline__ void pool_unit(const RowMatrix& rows, const PoolBags& bags,
                                          const PoolSegment& segment, std::int64_t bag,
                                          std::int64_t unit, std::int64_t* bad_position) {
  const std::int64_t end = bags.bag_offsets[bag + 1];
  Pooled<kWidth> pooled;
  for (std::int64_t j = bags.bag_offsets[bag]; j < end; j += kRowsAtOnce) {
    std::int64_t slots[kRowsAtOnce];
    float values[kRowsAtOnce][kWidth];
    for (int b = 0; b < kRowsAtOnce; ++b) {
      slots[b] = j + b < end ? slot_of(bags, j + b, rows.num_rows, unit == 0, bad_position) : -1;
    }
    for (int b = 0; b < kRowsAtOnce; ++b) {
      if (slots[b] >= 0) load_unit<kWidth>(rows.data + slots[b] * rows.stride, unit, values[b]);
    }
    for (int b = 0; b < kRowsAtOnce; ++b) {
      if (slots[b] < 0) continue;
      if (bags.weights != nullptr) {
        const float weight = bags.weights[j + b];
        for (int k = 0; k < kWidth; ++k) values[b][k] = weight * values[b][k];
      }
      pooled.add(segment, values[b]);
    }
  }
  if (has_mode(segment, PoolMode::kMean) && pooled.count > 0) {
    for (int k = 0; k < kWidth; ++k) pooled.values[k] /= static_cast<float>(pooled.count);
  }
  store_unit<kWidth>(segment.matrix + (bag - segment.first_bag) * segment.stride, unit,
                     pooled.values);
}

template <int kWidth>
__global__ void pool_bags(RowMatrix rows, PoolBags bags, std::int64_t* bad_position) {
  const std::int64_t bag = chosen_position();
  if (bag >= bags.num_bags) return;
  const PoolSegment segment = segment_of(bags, bag);
  for (std::int64_t unit = threadIdx.x; unit < rows.dim / kWidth; unit += blockDim.x) {
    pool_unit<kWidth>(rows, bags, segment, bag, unit, bad_position);
  }
}

template <int kWidth>
__global__ void weight_gradients(RowMatrix rows, PoolBags bags, float* weight_grad,
                                 std::int64_t* bad_position) {
  const std::int64_t j = chosen_position();
  if (j >= bags.num_occurrences) return;
  const std::int64_t bag = bag_of(bags, j);
  const PoolSegment segment = segment_of(bags, bag);
  const std::int64_t slot = slot_of(bags, j, rows.num_rows, threadIdx.x == 0, bad_position);
  float sum = 0.0f;
  if (slot >= 0 && segment.matrix != nullptr) {
    const float* const grad = segment.matrix + (bag - segment.first_bag) * segment.stride;
    const float* const row = rows.data + slot * rows.stride;
    float parts[kWidth] = {};
    NESTPIPE_ROLLED
    for (std::int64_t unit = threadIdx.x; unit < rows.dim / kWidth; unit += blockDim.x) {
      float g[kWidth], r[kWidth];
      load_unit<kWidth>(grad, unit, g);
      load_unit<kWidth>(row, unit, r);
      for (int k = 0; k < kWidth; ++k) parts[k] += g[k] * r[k];
    }
    sum = sum_of_lanes<kWidth>(parts, lanes_of_row());
  }
  if (threadIdx.x == 0) weight_grad[j] = sum;
}

bool takes_vectors(const RowMatrix& rows, const PoolBags& bags) {
  return bags.aligned && rows.dim % kFloatsPerVector == 0 && aligned_16(rows.data, rows.stride);
}

}  // namespace

void lookup_pool_forward(const RowMatrix& rows, const PoolBags& bags, std::int64_t* bad_position,
                         Stream stream) {
  if (bags.num_bags == 0 || rows.dim == 0) return;
  const bool wide = takes_vectors(rows, bags);
  const dim3 lanes = row_block(wide ? rows.dim / kFloatsPerVector : rows.dim);
  launch(wide ? pool_bags<4> : pool_bags<1>, num_blocks(bags.num_bags, lanes.y), lanes, 0, stream,
         rows, bags, bad_position);
}

void lookup_pool_weight_grad(const RowMatrix& rows, const PoolBags& bags, float* weight_grad,
                             std::int64_t* bad_position, Stream stream) {
  if (bags.num_occurrences == 0) return;
  const bool wide = takes_vectors(rows, bags);
  const unsigned of_sum = wide ? kLanesOfSum<4> : kLanesOfSum<1>;
  const dim3 lanes(of_sum, kRowThreads / of_sum);
  launch(wide ? weight_gradients<4> : weight_gradients<1>,
         num_blocks(bags.num_occurrences, lanes.y), lanes, 0, stream, rows, bags, weight_grad,
         bad_position);
}

}  // namespace cuda
}  // namespace nestpipe
