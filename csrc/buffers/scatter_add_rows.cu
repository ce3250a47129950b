// Writes to, adds to, or clears chosen rows of a matrix in device memory.
#include "../cuda/row_lanes.cuh"
#include "nestpipe/cuda/rows.h"

namespace nestpipe {
namespace cuda {
namespace {

struct Write {
  template <typename Unit>
  static __device__ __forceinline__ void apply(Unit& target, const Unit& source) {
    target = source;
  }
};

struct Add {
  static __device__ __forceinline__ void apply(float& target, float source) { target += source; }
  static __device__ __forceinline__ void apply(float4& target, const float4& source) {
    const float4 t = target;
    target = make_float4(t.x + source.x, t.y + source.y, t.z + source.z, t.w + source.w);
  }
};

// Unit: float4 or float. No source: zeros.
template <typename Change, typename Unit>
__global__ void change_rows(ScatterRows a, ChosenRows chosen) {
  const std::int64_t j = chosen_position();
  if (j >= a.size) return;
  const std::int64_t row = chosen_row(chosen, j);
  if (row < 0) return;
  Unit* to = reinterpret_cast<Unit*>(a.target + row * a.target_stride);
  const Unit* from = reinterpret_cast<const Unit*>(a.source + j * a.source_stride);
  const std::int64_t units = a.dim * sizeof(float) / sizeof(Unit);
  NESTPIPE_ROLLED
  for (std::int64_t unit = threadIdx.x; unit < units; unit += blockDim.x) {
    Change::apply(to[unit], a.source == nullptr ? Unit{} : from[unit]);
  }
}

template <typename Change>
void change(const ScatterRows& a, std::int64_t* bad_position, Stream stream) {
  if (a.size == 0) return;
  const ChosenRows chosen = {a.index, a.size, a.num_rows, bad_position};
  const bool vectors = a.dim % kFloatsPerVector == 0 && aligned_16(a.target, a.target_stride) &&
                       aligned_16(a.source, a.source_stride);
  const dim3 threads = row_block(vectors ? a.dim / kFloatsPerVector : a.dim);
  launch(vectors ? change_rows<Change, float4> : change_rows<Change, float>,
         num_blocks(a.size, threads.y), threads, 0, stream, a, chosen);
}

}  // namespace

void scatter_rows(const ScatterRows& arguments, std::int64_t* bad_position, Stream stream) {
  change<Write>(arguments, bad_position, stream);
}

void scatter_add_rows(const ScatterRows& arguments, std::int64_t* bad_position, Stream stream) {
  change<Add>(arguments, bad_position, stream);
}

void zero_rows(const ScatterRows& arguments, std::int64_t* bad_position, Stream stream) {
  ScatterRows zeros = arguments;
  zeros.source = nullptr;
  zeros.source_stride = 0;
  change<Write>(zeros, bad_position, stream);
}

}  // namespace cuda
}  // namespace nestpipe
