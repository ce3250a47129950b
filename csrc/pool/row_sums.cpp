// Sums of rows: the same loops for vectors of 4 floats, which every processor this is built for
// has, and of 8 where there is AVX2.
#include "nestpipe/row_sums.h"

#include <atomic>

namespace nestpipe {
namespace {

std::atomic<bool> portable_only{false};

namespace portable {
constexpr int kLanes = 4;
#include "row_tiles.inc"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
constexpr int kLanes = 8;
#include "row_tiles.inc"
}  // namespace avx2
#pragma GCC pop_options
#endif

}  // namespace

AddRows add_rows_function(Weighing weighing) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && !portable_only.load(std::memory_order_relaxed)) {
    return avx2::function_for(weighing);
  }
#endif
  return portable::function_for(weighing);
}

void use_portable_sums(bool portable) { portable_only.store(portable, std::memory_order_relaxed); }

}  // namespace nestpipe
