// Values of nestpipe_kernels.types.KeyStatus, for kernels.
#pragma once

#include <cstdint>

namespace nestpipe {
namespace cuda {

constexpr std::uint8_t kFoundKey = 0;
constexpr std::uint8_t kInsertedKey = 1;
constexpr std::uint8_t kAbsentKey = 2;
constexpr std::uint8_t kRefusedKey = 3;

}  // namespace cuda
}  // namespace nestpipe
