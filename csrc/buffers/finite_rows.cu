// Which rows of a gradient matrix hold only finite numbers, in device memory.
//
// Floor, bytes a row: 4 * dim, and 1 where rows are told apart.
#include "../cuda/row_lanes.cuh"
#include "../cuda/row_units.cuh"
#include "nestpipe/cuda/gradients.h"
#include "nestpipe/magnitude.h"

namespace nestpipe {
namespace cuda {
namespace {

struct Rows {
  const float* data;
  std::int64_t num_rows, stride, dim;
};

template <int kWidth>
__device__ __forceinline__ bool is_finite_here(const Rows& rows, std::int64_t row) {
  constexpr std::int32_t kInfinity = 0x7F800000;
  bool finite = true;
  NESTPIPE_ROLLED
  for (std::int64_t unit = threadIdx.x; unit < rows.dim / kWidth; unit += blockDim.x) {
    float values[kWidth];
    load_unit<kWidth>(rows.data + row * rows.stride, unit, values);
    for (int k = 0; k < kWidth; ++k) finite &= magnitude(values[k]) < kInfinity;
  }
  return finite;
}

template <int kWidth>
__global__ void mark_rows(Rows rows, std::uint8_t* finite) {
  const std::int64_t row = chosen_position();
  if (row >= rows.num_rows) return;
  const unsigned lanes = lanes_of_row();
  const bool here = is_finite_here<kWidth>(rows, row);
  const unsigned bad = __ballot_sync(lanes, here ? 0 : 1) & lanes;
  if (threadIdx.x == 0) finite[row] = bad == 0 ? 1 : 0;
}

template <int kWidth>
__global__ void mark_all(Rows rows, std::uint8_t* all) {
  const std::int64_t row = chosen_position();
  if (row < rows.num_rows && !is_finite_here<kWidth>(rows, row)) store_racing(all, std::uint8_t{0});
}

__global__ void set_true(std::uint8_t* all) { *all = 1; }

template <typename Kernel>
void for_rows(const Rows& rows, Kernel vectors, Kernel words, std::uint8_t* result, Stream stream) {
  if (rows.num_rows == 0) return;
  const bool wide = rows.dim % kFloatsPerVector == 0 && aligned_16(rows.data, rows.stride);
  const dim3 threads = row_block(wide ? rows.dim / kFloatsPerVector : rows.dim);
  launch(wide ? vectors : words, num_blocks(rows.num_rows, threads.y), threads, 0, stream, rows,
         result);
}

}  // namespace

void finite_rows(const float* rows, std::int64_t num_rows, std::int64_t row_stride,
                 std::int64_t dim, std::uint8_t* finite, Stream stream) {
  for_rows({rows, num_rows, row_stride, dim}, &mark_rows<4>, &mark_rows<1>, finite, stream);
}

void all_finite(const float* rows, std::int64_t num_rows, std::int64_t row_stride, std::int64_t dim,
                std::uint8_t* all, Stream stream) {
  launch(set_true, 1, 1, 0, stream, all);
  for_rows({rows, num_rows, row_stride, dim}, &mark_all<4>, &mark_all<1>, all, stream);
}

}  // namespace cuda
}  // namespace nestpipe
