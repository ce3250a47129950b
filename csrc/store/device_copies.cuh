// Copies of embeddings by handle that several calls of a store in device memory end with.
#pragma once

#include "nestpipe/cuda/device_store.h"

namespace nestpipe {
namespace cuda {

// out [size, dim] of the rows that the handles name; others are left as they are.
void copy_found(const StoreView& store, const DeviceHandles& rows, float* out, Stream stream);
// The others: what keys without a row read, where the status is neither kFound nor kInserted, or,
// without status, where the handle is -1.
void fill_without_row(const StoreView& store, const DeviceKeys& in, const std::int64_t* handles,
                      const std::uint8_t* status, float* out, Stream stream);

}  // namespace cuda
}  // namespace nestpipe
