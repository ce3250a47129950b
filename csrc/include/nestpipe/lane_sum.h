// The fixed-order sum over a row: 16 lanes, element d into lane d % 16, then pairwise halves. Same
// bits on every machine.
#pragma once

#include <cstdint>

namespace nestpipe {

constexpr int kSumLanes = 16;

// Adds up term(d) for d in [0, dim); term must return float. The empty sum is +0.0.
// Always inlined, so that it has its caller's instructions.
template <typename Term>
__attribute__((always_inline)) inline float lane_sum(std::int64_t dim, const Term& term) {
  float lanes[kSumLanes] = {};
  std::int64_t d = 0;
  for (; d + kSumLanes <= dim; d += kSumLanes) {
    for (int lane = 0; lane < kSumLanes; ++lane) lanes[lane] += term(d + lane);
  }
  for (int lane = 0; d + lane < dim; ++lane) lanes[lane] += term(d + lane);
  for (int half = kSumLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

}  // namespace nestpipe
