// Entry point of the extension: every family of operations registers itself.
#include "bindings.h"
#include "nestpipe/abi.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "Native kernels of nestpipe_kernels: pointers, sizes, no torch.";
  module.attr("abi_version") = nestpipe::kAbiVersion;
  module.attr("compiler") = "compiler " __VERSION__;
  nestpipe::bind_threads(module);
  nestpipe::bind_store(module);
  nestpipe::bind_storage(module);
  nestpipe::bind_keys(module);
  nestpipe::bind_pool(module);
  nestpipe::bind_optim(module);
  nestpipe::bind_buffers(module);
}
