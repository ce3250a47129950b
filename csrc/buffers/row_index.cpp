// Range and distinctness checks of row indices: on all threads; who has to name the first bad one
// looks again alone.
#include "nestpipe/row_index.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "nestpipe/parallel.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kGrain = 16384;

[[noreturn]] void throw_repeated(const char* operation, const char* name, const std::int64_t* index,
                                 std::int64_t num_rows) {
  std::vector<bool> seen(static_cast<std::size_t>(num_rows));
  std::int64_t position = 0;
  for (; !seen[static_cast<std::size_t>(index[position])]; ++position) {
    seen[static_cast<std::size_t>(index[position])] = true;
  }
  throw std::invalid_argument(std::string(operation) + ": " + name + " must be distinct, got row " +
                              std::to_string(index[position]) + " again at position " +
                              std::to_string(position));
}

}  // namespace

void check_row_index(const char* operation, const char* name, const std::int64_t* index,
                     std::int64_t size, std::int64_t num_rows) {
  std::atomic<bool> outside{false};
  parallel_ranges(size, kGrain, [&](std::int64_t begin, std::int64_t end) {
    std::uint64_t largest = 0;  // a negative index is huge as unsigned
    for (std::int64_t j = begin; j < end; ++j) {
      const auto value = static_cast<std::uint64_t>(index[j]);
      largest = value > largest ? value : largest;
    }
    if (largest >= static_cast<std::uint64_t>(num_rows)) {
      outside.store(true, std::memory_order_relaxed);
    }
  });
  if (!outside.load(std::memory_order_relaxed)) return;
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
  // Each slice of positions has a bitmap of its own: threads that share one pass its lines back and
  // forth.
  const std::size_t words = static_cast<std::size_t>(num_rows / 64 + 1);
  const bool alone = size < 2 * kGrain || num_rows / 32 > size;
  const std::int64_t slices = alone ? 1 : num_threads();
  std::vector<std::vector<std::uint64_t>> seen(static_cast<std::size_t>(slices));
  std::vector<std::uint64_t> repeated(static_cast<std::size_t>(slices));
  parallel_tasks(slices, [&](std::int64_t slice) {
    std::vector<std::uint64_t> own(words);
    std::uint64_t twice = 0;
    for (std::int64_t j = size * slice / slices; j < size * (slice + 1) / slices; ++j) {
      std::uint64_t& word = own[static_cast<std::size_t>(index[j] >> 6)];
      const std::uint64_t bit = std::uint64_t{1} << (index[j] & 63);
      twice |= word & bit;
      word |= bit;
    }
    repeated[static_cast<std::size_t>(slice)] = twice;
    seen[static_cast<std::size_t>(slice)] = std::move(own);
  });
  std::uint64_t any = repeated[0];
  for (std::size_t slice = 1; slice < seen.size(); ++slice) {
    any |= repeated[slice];
    for (std::size_t w = 0; w < words; ++w) {
      any |= seen[0][w] & seen[slice][w];
      seen[0][w] |= seen[slice][w];
    }
  }
  if (any != 0) throw_repeated(operation, name, index, num_rows);
}

}  // namespace nestpipe
