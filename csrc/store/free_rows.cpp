// Rows that no key has: kept as bits, given out lowest first.
#include "nestpipe/free_rows.h"

#include <algorithm>

namespace nestpipe {

void FreeRows::reserve(std::uint64_t num_rows) {
  words_.reserve((num_rows + 63) >> 6);
  groups_.reserve((num_rows + 4095) >> 12);
}

void FreeRows::add(std::uint32_t row) {
  const std::uint64_t w = row >> 6;
  *word(w) |= bit(row);
  *group(w >> 6) |= bit(w);
  first_group_ = size_ == 0 ? w >> 6 : std::min(first_group_, w >> 6);
  ++size_;
}

void FreeRows::lowest(std::int64_t count, std::uint32_t* rows) const {
  if (count == 0) return;
  std::uint32_t* const end = rows + count;
  for_each_word([&](std::uint64_t w, const std::uint64_t* bits) {
    for (std::uint64_t left = *bits; left != 0 && rows != end; left &= left - 1) {
      *rows++ = static_cast<std::uint32_t>(w << 6 | static_cast<unsigned>(__builtin_ctzll(left)));
    }
    return rows != end;
  });
}

void FreeRows::take(std::int64_t count) {
  if (count == 0) return;
  size_ -= count;
  for_each_word([&](std::uint64_t w, std::uint64_t* bits) {
    first_group_ = w >> 6;
    if (count >= __builtin_popcountll(*bits)) {
      count -= __builtin_popcountll(*bits);
      *bits = 0;
      *group(w >> 6) &= ~bit(w);
    } else {
      for (; count > 0; --count) *bits &= *bits - 1;
    }
    return count > 0;
  });
}

std::uint64_t FreeRows::bytes_behind(std::uint64_t num_rows) const {
  return words_.bytes_behind((num_rows + 63) >> 6) + groups_.bytes_behind((num_rows + 4095) >> 12);
}

}  // namespace nestpipe
