// Range and distinctness checks of row indices.
#include "nestpipe/row_index.h"

#include <stdexcept>
#include <string>
#include <vector>

namespace nestpipe {

void check_row_index(const char* operation, const char* name, const std::int64_t* index,
                     std::int64_t size, std::int64_t num_rows) {
  std::uint64_t largest = 0;  // a negative index is huge as unsigned
  for (std::int64_t j = 0; j < size; ++j) {
    const auto value = static_cast<std::uint64_t>(index[j]);
    largest = value > largest ? value : largest;
  }
  if (size == 0 || largest < static_cast<std::uint64_t>(num_rows)) return;
  std::int64_t position = 0;
  while (static_cast<std::uint64_t>(index[position]) < static_cast<std::uint64_t>(num_rows)) {
    ++position;
  }
  throw std::out_of_range(std::string(operation) + ": " + name + " must lie in [0, " +
                          std::to_string(num_rows) + "), got " + std::to_string(index[position]) +
                          " at position " + std::to_string(position));
}

void check_distinct_row_index(const char* operation, const char* name, const std::int64_t* index,
                              std::int64_t size, std::int64_t num_rows) {
  check_row_index(operation, name, index, size, num_rows);
  std::vector<std::uint64_t> seen(static_cast<std::size_t>(num_rows / 64 + 1));
  std::uint64_t repeated = 0;
  for (std::int64_t j = 0; j < size; ++j) {
    std::uint64_t& word = seen[static_cast<std::size_t>(index[j] >> 6)];
    const std::uint64_t bit = std::uint64_t{1} << (index[j] & 63);
    repeated |= word & bit;
    word |= bit;
    if (repeated != 0) {
      throw std::invalid_argument(std::string(operation) + ": " + name +
                                  " must be distinct, got row " + std::to_string(index[j]) +
                                  " again at position " + std::to_string(j));
    }
  }
}

}  // namespace nestpipe
