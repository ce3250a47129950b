// What the bindings of `_cuda` share. Addresses are of device memory; Python has checked dtype,
// shape, contiguity and device. Each .cpp beside this file defines one register function.
#pragma once

#include <pybind11/stl.h>

#include <tuple>

#include "../bindings.h"
#include "nestpipe/cuda/runtime.h"

namespace nestpipe {
namespace cuda {

using Address = std::uintptr_t;
using Count = std::int64_t;
// (address, num_rows, stride)
using Matrix = std::tuple<Address, Count, Count>;
// (address, size)
using Index = std::tuple<Address, Count>;
// Where an operation runs: (device, address of its stream). The last argument of every operation.
using Place = std::tuple<int, Address>;

// Runs `operation(stream)` with the place's device as the thread's current one.
template <typename Operation>
void at(const Place& place, const Operation& operation) {
  const OnDevice guard(std::get<0>(place));
  operation(as_pointer<CUstream_st>(std::get<1>(place)));
}

void bind_cuda_gradients(py::module_& module);
void bind_cuda_keys(py::module_& module);
void bind_cuda_optim(py::module_& module);
void bind_cuda_pool(py::module_& module);
void bind_cuda_rows(py::module_& module);
void bind_cuda_store(py::module_& module);

}  // namespace cuda
}  // namespace nestpipe
