// What becomes of row gradients in device memory before rows are updated: sums over sources, rows
// taken out of an accumulator, and whether numbers are finite.
//
// The CPU's operations with pointers to device memory; bad_position as in rows.h. Nothing
// synchronizes.
#pragma once

#include <cstdint>

#include "nestpipe/cuda/stream.h"
#include "nestpipe/mean_sources.h"
#include "nestpipe/take_rows.h"

namespace nestpipe {
namespace cuda {

void mean_sources(const MeanSources& arguments, std::int64_t* bad_position, Stream stream);
void take_rows(const TakeRows& arguments, std::int64_t* bad_position, Stream stream);
void finite_rows(const float* rows, std::int64_t num_rows, std::int64_t row_stride,
                 std::int64_t dim, std::uint8_t* finite, Stream stream);
// *all = 1 or 0.
void all_finite(const float* rows, std::int64_t num_rows, std::int64_t row_stride, std::int64_t dim,
                std::uint8_t* all, Stream stream);

}  // namespace cuda
}  // namespace nestpipe
