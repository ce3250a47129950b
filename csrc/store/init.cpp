// The generator of initial values and the distributions over it.
#include "nestpipe/init.h"

#include <cmath>
#include <cstring>

#include "nestpipe/hash.h"

namespace nestpipe {
namespace {

constexpr std::uint64_t kStep =
    0x9E3779B97F4A7C15ull;  // 2^64 / golden ratio, odd: a full-period step.

// Word e of a stream is the mixed counter stream + (e + 1) * kStep.
std::uint64_t stream_of(std::uint64_t seed, std::uint64_t table_hash, std::int64_t key) {
  return mix64(mix64(seed + kStep) + hash_key(table_hash, key));
}

// Natural logarithm of a normal positive double: x = m * 2^e with m in [sqrt(1/2), sqrt(2)), and
// log m = 2 atanh(s), s = (m - 1) / (m + 1), by its series; |s| < 0.172 leaves less than 1e-16
// after ten terms.
double natural_log(double x) {
  std::uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  auto exponent = static_cast<double>(static_cast<std::int64_t>(bits >> 52) - 1023);
  bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  double mantissa;
  std::memcpy(&mantissa, &bits, sizeof mantissa);
  if (mantissa >= 1.4142135623730951) {
    mantissa = mantissa * 0.5;
    exponent = exponent + 1.0;
  }
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double square = s * s;
  double series = 0.0;
  for (int k = 9; k >= 0; --k) series = series * square + 1.0 / (2.0 * k + 1.0);
  return 2.0 * (s * series) + exponent * 0.6931471805599453;
}

// cos(x) for x in [0, pi/2] by its Taylor series, nested: 1 - x^2/2 (1 - x^2/12 (1 - ...)).
double cosine(double x) {
  const double square = x * x;
  double series = 1.0;
  for (int k = 11; k >= 1; --k) {
    series = 1.0 - square * (1.0 / ((2.0 * k - 1.0) * (2.0 * k))) * series;
  }
  return series;
}

// Box and Muller's transform of one word: 32 bits for the radius, 31 for the angle's place in a
// quadrant, 1 for the sign.
double standard_normal(std::uint64_t word) {
  const double u = (static_cast<double>(word >> 32) + 0.5) * 0x1p-32;
  const double v = static_cast<double>(word & 0x7FFFFFFFu) * 0x1p-31;
  const double radius = std::sqrt(-2.0 * natural_log(u));
  const double value = radius * cosine(v * 1.5707963267948966);
  return (word & 0x80000000u) != 0 ? -value : value;
}

}  // namespace

void initial_values(const Initializer& init, std::uint64_t seed, std::uint64_t table_hash,
                    std::int64_t key, std::int64_t dim, float* out) {
  if (init.kind == InitKind::kConstant) {
    for (std::int64_t d = 0; d < dim; ++d) out[d] = static_cast<float>(init.first);
    return;
  }
  std::uint64_t counter = stream_of(seed, table_hash, key);
  const double width = init.second - init.first;
  for (std::int64_t d = 0; d < dim; ++d) {
    counter += kStep;
    const std::uint64_t word = mix64(counter);
    double value;
    if (init.kind == InitKind::kUniform) {
      value = init.first + width * (static_cast<double>(word >> 11) * 0x1p-53);
    } else {
      value = init.first + init.second * standard_normal(word);
    }
    out[d] = static_cast<float>(value);
  }
}

}  // namespace nestpipe
