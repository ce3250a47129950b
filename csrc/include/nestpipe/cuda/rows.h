// Copies of rows in device memory: from and to chosen places of a buffer, and between two buffers.
//
// Every operation takes the CPU operation's arguments with pointers to device memory. An index out
// of range is skipped, and the smallest j with one is left in *bad_position (device memory; the
// caller sets it to -1 before), unless that is null. That targets are distinct is the caller's
// word. Nothing synchronizes.
#pragma once

#include <cstdint>

#include "nestpipe/cuda/stream.h"
#include "nestpipe/gather_rows.h"
#include "nestpipe/row_sync.h"
#include "nestpipe/scatter_add_rows.h"

namespace nestpipe {
namespace cuda {

void gather_rows(const GatherRows& arguments, std::int64_t* bad_position, Stream stream);
void row_sync(const RowSync& arguments, std::int64_t* bad_position, Stream stream);
void scatter_rows(const ScatterRows& arguments, std::int64_t* bad_position, Stream stream);
void scatter_add_rows(const ScatterRows& arguments, std::int64_t* bad_position, Stream stream);
void zero_rows(const ScatterRows& arguments, std::int64_t* bad_position, Stream stream);

}  // namespace cuda
}  // namespace nestpipe
