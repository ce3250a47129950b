// One register function per family of operations; each .cpp beside this file defines one.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace nestpipe {

namespace py = pybind11;

// Arguments that are arrays arrive as addresses; Python has checked dtype, shape and contiguity.
template <typename T>
T* as_pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_threads(py::module_& module);
void bind_store(py::module_& module);
void bind_storage(py::module_& module);
void bind_keys(py::module_& module);
void bind_pool(py::module_& module);
void bind_optim(py::module_& module);
void bind_buffers(py::module_& module);

}  // namespace nestpipe
