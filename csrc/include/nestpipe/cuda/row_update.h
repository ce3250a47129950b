// Update rules in place on rows in device memory: the CPU's row_update, with the same bits.
#pragma once

#include "nestpipe/cuda/stream.h"
#include "nestpipe/row_update.h"

namespace nestpipe {
namespace cuda {

// Every pointer of the arguments, those of `rounding` included, is of device memory; `pointers` is
// not used. Does not synchronize.
void row_update(const UpdateArguments& arguments, const UpdateSettings& settings, Stream stream);

}  // namespace cuda
}  // namespace nestpipe
