// Initial values of rows: a function of (seed, table, key, element) alone.
//
// A counter-based generator gives each element a 64-bit word; uniform and normal values follow from
// it by IEEE double additions, multiplications, divisions and square roots in a fixed order,
// rounded to float once. No libm and no fused operations, so every machine, and numpy, gets the
// same bits.
#pragma once

#include <cstdint>

namespace nestpipe {

enum class InitKind : int { kConstant = 0, kUniform = 1, kNormal = 2 };

struct Initializer {
  InitKind kind = InitKind::kConstant;
  double first = 0.0;   // The constant, the lower end, the mean.
  double second = 0.0;  // Unused, the upper end, the standard deviation.
};

// Writes the embedding that `key` starts with to out [dim].
void initial_values(const Initializer& init, std::uint64_t seed, std::uint64_t table_hash,
                    std::int64_t key, std::int64_t dim, float* out);

}  // namespace nestpipe
