// Devices and the driver. A call of the runtime that fails leaves its error to the next caller, so
// each error is taken.
#include <stdexcept>
#include <string>

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

void check_launch() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("CUDA: a kernel could not be started: ") +
                           cudaGetErrorString(error));
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
