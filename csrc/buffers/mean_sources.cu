// The mean over sources of row gradients, in device memory: one pass, a few lanes a row.
//
// Floor, bytes: 4 * dim for each entry and each row written, 8 for each entry's place.
#include "../cuda/row_lanes.cuh"
#include "../cuda/row_units.cuh"
#include "nestpipe/cuda/gradients.h"
#include "nestpipe/magnitude.h"

namespace nestpipe {
namespace cuda {
namespace {

// Adds a row's entries [begin, end) element by element; returns the largest magnitude of one.
template <int kWidth>
__device__ __forceinline__ std::int32_t add_entries(const MeanSources& a, std::int64_t begin,
                                                    std::int64_t end, std::int64_t unit,
                                                    float* sum) {
  std::int32_t largest = 0;
  std::int64_t source = 0;
  for (std::int64_t k = begin; k < end; ++k) {
    const std::int64_t entry = a.order[k];
    while (entry >= a.source_ends[source]) ++source;
    const float divisor = a.divisors[source];
    float values[kWidth];
    load_unit<kWidth>(a.boxes + entry * a.dim, unit, values);
    for (int i = 0; i < kWidth; ++i) {
      if (divisor != 1.0f) values[i] /= divisor;
      const std::int32_t size = magnitude(values[i]);
      largest = size > largest ? size : largest;
      sum[i] += values[i];
    }
  }
  return largest;
}

template <int kWidth>
__global__ void mean_rows(MeanSources a, ChosenRows chosen, std::int32_t limit) {
  const std::int64_t j = chosen_position();
  if (j >= chosen.size) return;
  const std::int64_t row = chosen.index == nullptr ? j : chosen_row(chosen, j);
  if (row < 0) return;
  const std::int64_t begin = a.starts[row], end = a.starts[row + 1];
  const float sources = static_cast<float>(a.num_sources);
  bool good = true;
  for (std::int64_t unit = threadIdx.x; unit < a.dim / kWidth; unit += blockDim.x) {
    float sum[kWidth] = {};
    good &= add_entries<kWidth>(a, begin, end, unit, sum) <= limit;
    for (int i = 0; i < kWidth && a.num_sources != 1; ++i) sum[i] /= sources;
    store_unit<kWidth>(a.total + row * a.dim, unit, sum);
  }
  if (!good) a.countable[row] = 0;  // several lanes may, all the same
}

}  // namespace

void mean_sources(const MeanSources& a, std::int64_t* bad_position, Stream stream) {
  const ChosenRows chosen = {a.rows, a.rows != nullptr ? a.num_chosen : a.num_rows, a.num_rows,
                             bad_position};
  if (chosen.size == 0) return;
  const bool vectors = aligned_16(a.total, a.dim) && aligned_16(a.boxes, a.dim);
  const dim3 threads = row_block(vectors ? a.dim / kFloatsPerVector : a.dim);
  launch(vectors ? mean_rows<4> : mean_rows<1>, num_blocks(chosen.size, threads.y), threads, 0,
         stream, a, chosen, magnitude(a.limit));
}

}  // namespace cuda
}  // namespace nestpipe
