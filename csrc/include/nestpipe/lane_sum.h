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
    for (int l = 0; l < kSumLanes; ++l) lanes[l] += term(d + l);
  }
  int lane = 0;
  if (d + kSumLanes / 2 <= dim) {
    for (; lane < kSumLanes / 2; ++lane) lanes[lane] += term(d + lane);
  }
  for (; d + lane < dim; ++lane) lanes[lane] += term(d + lane);
  for (int half = kSumLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

}  // namespace nestpipe
