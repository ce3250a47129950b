// Rows copied out of a matrix, measured and cleared, in device memory: one pass.
//
// Floor, bytes a row: 12 * dim (read, copied, cleared), 8 for its index, 4 for its peak.
#include "../cuda/row_lanes.cuh"
#include "../cuda/row_units.cuh"
#include "nestpipe/cuda/gradients.h"
#include "nestpipe/magnitude.h"
#include "nestpipe/row_storage.h"

namespace nestpipe {
namespace cuda {
namespace {

template <int kWidth>
__global__ void take(TakeRows a, ChosenRows chosen) {
  const std::int64_t j = chosen_position();
  if (j >= chosen.size) return;
  const std::int64_t row = chosen_row(chosen, j);
  if (row < 0) return;
  float* const from = a.matrix + row * a.stride;
  const float zeros[kWidth] = {};
  int largest = 0;
  NESTPIPE_ROLLED
  for (std::int64_t unit = threadIdx.x; unit < a.dim / kWidth; unit += blockDim.x) {
    float values[kWidth];
    load_unit<kWidth>(from, unit, values);
    for (int k = 0; k < kWidth; ++k) {
      largest = magnitude(values[k]) > largest ? magnitude(values[k]) : largest;
    }
    store_unit<kWidth>(a.out + j * a.dim, unit, values);
    store_unit<kWidth>(from, unit, zeros);
  }
  const unsigned lanes = lanes_of_row();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    const int other = __shfl_xor_sync(lanes, largest, static_cast<int>(half));
    largest = other > largest ? other : largest;
  }
  if (threadIdx.x == 0) a.peaks[j] = bits_float(static_cast<std::uint32_t>(largest));
}

}  // namespace

void take_rows(const TakeRows& a, std::int64_t* bad_position, Stream stream) {
  if (a.size == 0) return;
  const ChosenRows chosen = {a.index, a.size, a.num_rows, bad_position};
  const bool vectors =
      a.dim % kFloatsPerVector == 0 && aligned_16(a.matrix, a.stride) && aligned_16(a.out, a.dim);
  const dim3 threads = row_block(vectors ? a.dim / kFloatsPerVector : a.dim);
  launch(vectors ? take<4> : take<1>, num_blocks(a.size, threads.y), threads, 0, stream, a, chosen);
}

}  // namespace cuda
}  // namespace nestpipe
