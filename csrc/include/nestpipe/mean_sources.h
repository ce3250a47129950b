// The mean over sources of row gradients.
#pragma once

#include <cstdint>

namespace nestpipe {

// Entries of a list by the row that each belongs to: those of row u are order[starts[u]] ..
// order[starts[u + 1] - 1], ascending. slot[m] must lie in [0, num_rows); throws std::out_of_range.
void entries_by_row(const std::int64_t* slot, std::int64_t size, std::int64_t num_rows,
                    std::int64_t* starts,  // [num_rows + 1]
                    std::int64_t* order);  // [size]

struct MeanSources {
  float* total = nullptr;             // [num_rows, dim], contiguous; written for the chosen rows
  std::uint8_t* countable = nullptr;  // [num_rows]; set to 0 where a source's gradient is bad
  std::int64_t num_rows = 0;
  std::int64_t dim = 0;
  const float* boxes = nullptr;  // [size, dim], contiguous; the sources' entries in turn
  std::int64_t size = 0;
  const std::int64_t* starts = nullptr;  // from entries_by_row
  const std::int64_t* order = nullptr;
  const std::int64_t* source_ends = nullptr;  // [num_sources], ascending: where each one's end
  const float* divisors = nullptr;            // [num_sources]
  std::int64_t num_sources = 0;
  const std::int64_t* rows = nullptr;  // [num_chosen], distinct; null: all rows
  std::int64_t num_chosen = 0;
  float limit = 0;  // a magnitude above it, or a NaN, is bad; infinity: only a NaN is
};

// total[u] = (0 + boxes[e1] / divisor(e1) + boxes[e2] / divisor(e2) + ...) / num_sources, entries
// of row u ascending. Throws std::out_of_range or std::invalid_argument for `rows`, nothing
// written.
void mean_sources(const MeanSources& arguments);

}  // namespace nestpipe
