// Magnitudes of floats as integers that compare alike.
#pragma once

#include <cstdint>
#include <cstring>

#include "nestpipe/host_device.h"

namespace nestpipe {

// Those of a NaN are above those of infinity.
NESTPIPE_HOST_DEVICE inline std::int32_t magnitude(float value) {
  std::int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7FFFFFFF;
}

}  // namespace nestpipe
