// Initial values of rows: a function of (seed, table, key, element) alone.
//
// A counter-based generator gives each element a 64-bit word; values follow from it by IEEE double
// additions, multiplications, divisions and square roots in a fixed order, rounded to float once.
// No libm and no fused operations, so every machine, and numpy, gets the same bits.
#pragma once

#include <array>
#include <cstdint>

#include "nestpipe/hash.h"
#include "nestpipe/host_device.h"

namespace nestpipe {

enum class InitKind : int { kConstant = 0, kUniform = 1, kNormal = 2, kTruncatedNormal = 3 };

// The constant; the lower and the upper end; mean and standard deviation; these and the bounds, in
// standard deviations from the mean.
using InitParameters = std::array<double, 4>;

struct Initializer {
  InitKind kind = InitKind::kConstant;
  InitParameters parameters = {};
};

// Word e of a stream is the mixed counter stream + (e + 1) * kWordStep: 2^64 / golden ratio, odd, a
// full-period step.
constexpr std::uint64_t kWordStep = 0x9E3779B97F4A7C15ull;

NESTPIPE_HOST_DEVICE inline std::uint64_t value_stream(std::uint64_t seed, std::uint64_t table_hash,
                                                       std::int64_t key) {
  return mix64(mix64(seed + kWordStep) + hash_key(table_hash, key));
}

NESTPIPE_HOST_DEVICE inline std::uint64_t value_word(std::uint64_t stream, std::int64_t element) {
  return mix64(stream + (static_cast<std::uint64_t>(element) + 1) * kWordStep);
}

// Writes the embedding that `key` starts with to out [dim].
void initial_values(const Initializer& init, std::uint64_t seed, std::uint64_t table_hash,
                    std::int64_t key, std::int64_t dim, float* out);

}  // namespace nestpipe
