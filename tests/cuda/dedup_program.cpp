// Runs CUDA's dedup on heap arrays of the exact sizes, for AddressSanitizer.
#include <cstdint>
#include <vector>

#include "nestpipe/cuda/dedup.h"

int main() {
  const std::int64_t size = 2300;
  std::vector<std::int64_t> keys(size), unique_index(size), counts(size), num_unique(1);
  std::vector<std::int32_t> inverse(size);
  for (std::int64_t i = 0; i < size; ++i) keys[i] = i * i % 700;
  std::vector<unsigned char> work(nestpipe::cuda::dedup_work_bytes(size));
  nestpipe::cuda::dedup({keys.data(), nullptr, size}, work.data(),
                        {unique_index.data(), inverse.data(), counts.data(), num_unique.data()},
                        nullptr);
  return num_unique[0] > 0 && num_unique[0] <= size ? 0 : 1;
}
