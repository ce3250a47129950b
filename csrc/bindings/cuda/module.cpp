// Entry point of the CUDA extension: every family of operations registers itself.
#include "bindings.h"
#include "nestpipe/abi.h"

#if !defined(NESTPIPE_CUDA_ARCHITECTURES)
#define NESTPIPE_CUDA_ARCHITECTURES ""
#endif

PYBIND11_MODULE(_cuda, module) {
  using namespace nestpipe;
  module.doc() = "CUDA kernels of nestpipe_kernels: addresses, sizes and a stream, no torch.";
  module.attr("abi_version") = kAbiVersion;
  // As CMake has them: "80-real 90-real", say.
  module.attr("architectures") = NESTPIPE_CUDA_ARCHITECTURES;
  // (devices, version of CUDA that the driver supports, version this was built with, what is
  // wrong or ""); nothing here fails where there is no GPU
  module.def("driver", [] {
    const cuda::DriverState state = cuda::driver_state();
    return std::make_tuple(state.num_devices, state.driver_version, state.built_version,
                           state.problem);
  });
  cuda::bind_cuda_gradients(module);
  cuda::bind_cuda_keys(module);
  cuda::bind_cuda_optim(module);
  cuda::bind_cuda_pool(module);
  cuda::bind_cuda_rows(module);
  cuda::bind_cuda_store(module);
}
