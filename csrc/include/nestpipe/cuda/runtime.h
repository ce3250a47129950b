// What the CUDA runtime is asked for beside kernels, for callers without its headers.
#pragma once

#include <string>

#include "nestpipe/cuda/stream.h"

namespace nestpipe {
namespace cuda {

struct DriverState {
  int num_devices;
  int driver_version;  // the newest CUDA that the driver supports, as 1000 * major + 10 * minor; 0:
                       // no driver
  int built_version;   // the CUDA that this was built with
  std::string problem;  // why there are no devices; "" where there are
};

// Never fails, and leaves no error behind.
DriverState driver_state();

// Throws std::runtime_error if the kernel before could not be started.
void check_launch();

// Makes a device the calling thread's current one, until it goes out of scope. Throws
// std::runtime_error where there is no such device.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = -1;  // to be restored; -1: it was that one
};

}  // namespace cuda
}  // namespace nestpipe
