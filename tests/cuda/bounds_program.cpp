// A kernel that writes as many entries as it is told into arrays of 64, for AddressSanitizer.
#include <cstdlib>
#include <vector>

#include "nestpipe/cuda/platform.h"

namespace {

struct Shared {
  int values[64];
};

__global__ void write_values(int* values, int size) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < size) nestpipe::cuda::store_racing(values + i, i);
}

__global__ void write_shared_values(int size) {
  const int i = static_cast<int>(threadIdx.x);
  int* values = nestpipe::cuda::shared_memory<Shared>().values;
  if (i < size) nestpipe::cuda::store_racing(values + i, i);
  __syncthreads();
}

}  // namespace

int main(int, char** arguments) {
  const int size = std::atoi(arguments[1]);
  const bool is_shared = arguments[2] != nullptr;
  std::vector<int> values(64);
  if (is_shared) {
    nestpipe::cuda::launch(write_shared_values, 2, 96, sizeof(Shared), nullptr, size);
  } else {
    nestpipe::cuda::launch(write_values, 2, 96, 0, nullptr, values.data(), size);
  }
  return 0;
}
