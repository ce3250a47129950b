// Devices and the driver. A call of the runtime that fails leaves its error to the next caller, so
// each error is taken.
#include "nestpipe/cuda/platform.h"
#include "nestpipe/cuda/runtime.h"

namespace nestpipe {
namespace cuda {

DriverState driver_state() {
  DriverState state{};
  const cudaError_t counted = cudaGetDeviceCount(&state.num_devices);
  if (counted != cudaSuccess) {
    state.num_devices = 0;
    state.problem = cudaGetErrorString(counted);
  }
  if (cudaDriverGetVersion(&state.driver_version) != cudaSuccess) state.driver_version = 0;
  if (cudaRuntimeGetVersion(&state.built_version) != cudaSuccess) state.built_version = 0;
  cudaGetLastError();
  return state;
}

OnDevice::OnDevice(int device) {
  int current = -1;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) {
    error = cudaSetDevice(device);
    before_ = current;
  }
  if (error == cudaSuccess) return;
  before_ = -1;
  cudaGetLastError();
  throw std::runtime_error("CUDA: device " + std::to_string(device) +
                           " cannot be used: " + cudaGetErrorString(error));
}

OnDevice::~OnDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

}  // namespace cuda
}  // namespace nestpipe
