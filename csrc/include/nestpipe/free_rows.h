// The numbers of rows that no key has, lowest first: rows that follow each other are used together,
// so that writing them goes through memory in order.
//
// A bit for each row number that is free, and above it a bit for each word of 64 that has one, so
// that what is not free costs a word for 4,096 rows to pass over.
#pragma once

#include <cstdint>

#include "nestpipe/memory.h"
#include "nestpipe/slabs.h"

namespace nestpipe {

class FreeRows {
 public:
  explicit FreeRows(MemoryAccount* account) : words_(8, account), groups_(8, account) {}

  // Room for row numbers below num_rows; what comes after that does not fail. Throws
  // std::bad_alloc.
  void reserve(std::uint64_t num_rows);
  // A row with room that is not free now is from here on.
  void add(std::uint32_t row);
  std::int64_t size() const { return size_; }
  // rows [count] = the lowest ones, ascending; count is at most size().
  void lowest(std::int64_t count, std::uint32_t* rows) const;
  // The lowest ones are no longer free.
  void take(std::int64_t count);

  std::uint64_t bytes() const { return words_.bytes() + groups_.bytes(); }
  // Of these, what belongs to row numbers from num_rows on.
  std::uint64_t bytes_behind(std::uint64_t num_rows) const;

 private:
  static std::uint64_t bit(std::uint64_t number) { return std::uint64_t{1} << (number & 63); }
  std::uint64_t* word(std::uint64_t i) const { return static_cast<std::uint64_t*>(words_.at(i)); }
  std::uint64_t* group(std::uint64_t i) const { return static_cast<std::uint64_t*>(groups_.at(i)); }
  // Calls visit(number of the word, the word) for words with free rows, ascending, until it says
  // false.
  template <typename Visit>
  void for_each_word(const Visit& visit) const {
    for (std::uint64_t g = first_group_;; ++g) {
      for (std::uint64_t left = *group(g); left != 0; left &= left - 1) {
        const std::uint64_t w = g << 6 | static_cast<std::uint64_t>(__builtin_ctzll(left));
        if (!visit(w, word(w))) return;
      }
    }
  }

  Slabs words_;
  Slabs groups_;
  std::int64_t size_ = 0;
  std::uint64_t first_group_ = 0;  // No row of a group before it is free.
};

}  // namespace nestpipe
