// Writing rows past the caches: for results that are larger than these, so that lines are neither
// read before they are overwritten nor push out what is still needed.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace nestpipe {

constexpr std::int64_t kStreamFrom = std::int64_t{32} << 20;  // Bytes of the whole result.
constexpr std::int64_t kLineBytes = 64;

// Whether rows of row_bytes, one after another from `out` on, should be written that way: there are
// many, and each is made of whole lines.
inline bool worth_streaming(const void* out, std::int64_t row_bytes, std::int64_t num_rows) {
#ifdef __SSE2__
  return reinterpret_cast<std::uintptr_t>(out) % kLineBytes == 0 && row_bytes % kLineBytes == 0 &&
         row_bytes * num_rows >= kStreamFrom;
#else
  static_cast<void>(out), static_cast<void>(row_bytes), static_cast<void>(num_rows);
  return false;
#endif
}

// Copies whole lines to whole lines; end_streaming() before another thread may read them.
inline void stream_row(const float* from, std::int64_t row_bytes, float* to) {
#ifdef __SSE2__
  const auto* source = reinterpret_cast<const __m128i*>(from);
  auto* target = reinterpret_cast<__m128i*>(to);
  for (std::int64_t line = 0; line < row_bytes / kLineBytes; ++line) {
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
    source += 4;
    target += 4;
  }
#else
  std::memcpy(to, from, static_cast<std::size_t>(row_bytes));
#endif
}

inline void end_streaming() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace nestpipe
