// One element of an initial embedding, the same bits on CPUs and GPUs: IEEE double additions,
// multiplications, divisions and square roots in a fixed order, rounded to float once.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "nestpipe/hash.h"
#include "nestpipe/host_device.h"
#include "nestpipe/init.h"

namespace nestpipe {

// Natural logarithm of a normal positive double: x = m * 2^e with m in [sqrt(1/2), sqrt(2)), and
// log m = 2 atanh(s), s = (m - 1) / (m + 1), by its series; |s| < 0.172 leaves less than 1e-16
// after ten terms.
NESTPIPE_HOST_DEVICE inline double natural_log(double x) {
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
NESTPIPE_HOST_DEVICE inline double cosine(double x) {
  const double square = x * x;
  double series = 1.0;
  for (int k = 11; k >= 1; --k) {
    series = 1.0 - square * (1.0 / ((2.0 * k - 1.0) * (2.0 * k))) * series;
  }
  return series;
}

// Box and Muller's transform of one word: 32 bits for the radius, 31 for the angle's place in a
// quadrant, 1 for the sign.
NESTPIPE_HOST_DEVICE inline double standard_normal(std::uint64_t word) {
  const double u = (static_cast<double>(word >> 32) + 0.5) * 0x1p-32;
  const double v = static_cast<double>(word & 0x7FFFFFFFu) * 0x1p-31;
  const double radius = std::sqrt(-2.0 * natural_log(u));
  const double value = radius * cosine(v * 1.5707963267948966);
  return (word & 0x80000000u) != 0 ? -value : value;
}

// The first of the element's normal values that lies in [low, high]. Attempt k takes the word that
// follows by k steps from the element's own. The settings leave at least 1 % inside, so that all
// attempts fail with a probability below 1e-17; then the nearest bound stands in.
NESTPIPE_HOST_DEVICE inline double truncated_standard_normal(std::uint64_t word, double low,
                                                             double high) {
  constexpr std::uint64_t kAttempts = 4096;
  double value = standard_normal(word);
  for (std::uint64_t k = 1; k < kAttempts && !(value >= low && value <= high); ++k) {
    value = standard_normal(mix64(word + k * kWordStep));
  }
  return value < low ? low : value > high ? high : value;
}

// Element `element` of a row whose words are `stream`; p: the four parameters of the kind.
NESTPIPE_HOST_DEVICE inline float initial_value(InitKind kind, const double* p,
                                                std::uint64_t stream, std::int64_t element) {
  if (kind == InitKind::kConstant) return static_cast<float>(p[0]);
  const std::uint64_t word = value_word(stream, element);
  if (kind == InitKind::kUniform) {
    const double width = p[1] - p[0];
    return static_cast<float>(p[0] + width * (static_cast<double>(word >> 11) * 0x1p-53));
  }
  if (kind == InitKind::kNormal) return static_cast<float>(p[0] + p[1] * standard_normal(word));
  return static_cast<float>(p[0] + p[1] * truncated_standard_normal(word, p[2], p[3]));
}

}  // namespace nestpipe
