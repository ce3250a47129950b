// Sums of rows, element by element, in the order given. The bits are the same with and without
// AVX2: no element's additions depend on how many are done at once.
#pragma once

#include <cstdint>

namespace nestpipe {

// What a row is before it is added: itself, times its factor, or divided by it.
enum class Weighing { kPlain, kTimes, kOver };

// out[d] = (from_zero ? +0.0 : out[d]) + rows[0][d] + rows[1][d] + ...; rows and factors: [count].
// `factors` is read unless rows are plain.
using AddRows = void (*)(const float* const* rows, const float* factors, std::int64_t count,
                         std::int64_t dim, bool from_zero, float* out);

// The fastest one for this processor.
AddRows add_rows_function(Weighing weighing);

// Rows to hand over at a time: all of a row's sum stays in registers where rows are short, and long
// rows are read whole.
inline std::int64_t rows_at_a_time(std::int64_t dim) { return dim <= 128 ? 32 : 4; }
constexpr std::int64_t kMostRowsAtATime = 32;

// For tests: true leaves instructions out that not every processor has.
void use_portable_sums(bool portable);

}  // namespace nestpipe
