// Whole rows from one batch buffer to the other, in device memory.
#include "../cuda/row_lanes.cuh"
#include "nestpipe/cuda/rows.h"

namespace nestpipe {
namespace cuda {
namespace {

// Unit: uint4 or unsigned, as integers, since a header's bits may be those of a NaN.
template <typename Unit>
__global__ void sync_rows(RowSync a, ChosenRows sources, ChosenRows targets) {
  const std::int64_t j = chosen_position();
  if (j >= a.size) return;
  const std::int64_t source_row = chosen_row(sources, j), target_row = chosen_row(targets, j);
  if (source_row < 0 || target_row < 0) return;
  const Unit* from = reinterpret_cast<const Unit*>(a.source + source_row * a.row_floats);
  Unit* to = reinterpret_cast<Unit*>(a.target + target_row * a.row_floats);
  const std::int64_t units = a.row_floats * sizeof(float) / sizeof(Unit);
  NESTPIPE_ROLLED
  for (std::int64_t unit = threadIdx.x; unit < units; unit += blockDim.x) to[unit] = from[unit];
}

}  // namespace

void row_sync(const RowSync& a, std::int64_t* bad_position, Stream stream) {
  if (a.size == 0) return;
  const ChosenRows sources = {a.source_index, a.size, a.source_rows, bad_position};
  const ChosenRows targets = {a.target_index, a.size, a.target_rows, bad_position};
  const bool vectors = aligned_16(a.source, a.row_floats) && aligned_16(a.target, a.row_floats);
  const dim3 threads = row_block(vectors ? a.row_floats / kFloatsPerVector : a.row_floats);
  launch(vectors ? sync_rows<uint4> : sync_rows<unsigned>, num_blocks(a.size, threads.y), threads,
         0, stream, a, sources, targets);
}

}  // namespace cuda
}  // namespace nestpipe
