// An array of records that grows without moving any: slabs in groups of eight of the same size,
// each group twice as large as all before it, so that at most about an eighth is there too early.
//
// With s = r + 8 first, record r lies in the group of the top bit of s and, within it, in the slab
// of the three bits below; `first` is the first slabs' number of records, a power of two chosen so
// that one takes about 4 KB. The directory has a fixed size, so an address may be computed while
// another thread adds slabs. Slabs lie in memory, or in a file: there they cost no disk before they
// are used, and each group is one slab.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "nestpipe/memory.h"
#include "nestpipe/row_file.h"

namespace nestpipe {

class Slabs {
 public:
  Slabs(std::size_t bytes_per_record, MemoryAccount* account, RowFile* file = nullptr)
      : bytes_per_record_(bytes_per_record),
        account_(account),
        file_(file),
        split_log2_(file == nullptr ? kSplitLog2 : 0) {
    while ((std::size_t{2} << first_log2_) * bytes_per_record <= kFirstSlabBytes) ++first_log2_;
    base_log2_ = first_log2_ + split_log2_;
  }

  // Makes records 0 .. num_records - 1 exist. Throws std::bad_alloc, FileError; what exists stays.
  void reserve(std::uint64_t num_records) {
    while (capacity_ < num_records) {
      const std::uint64_t records = std::uint64_t{1} << (first_log2_ + (num_slabs_ >> split_log2_));
      const std::size_t bytes = static_cast<std::size_t>(records) * bytes_per_record_;
      if (file_ != nullptr) {
        data_[num_slabs_] = file_->add_slab(bytes);
      } else {
        slabs_[num_slabs_] = Block(account_, bytes);
        data_[num_slabs_] = static_cast<char*>(slabs_[num_slabs_].data());
        bytes_ += slabs_[num_slabs_].bytes();
      }
      ++num_slabs_;
      capacity_ += records;
    }
    if (file_ == nullptr || num_records == 0) return;
    const RowFile::Range last = range(num_records - 1);
    file_->allocate(last.slab, last.end);
  }

  void* at(std::uint64_t record) const {
    const RowFile::Range place = range(record);
    return data_[place.slab] + place.begin;
  }

  // Where a record lies.
  RowFile::Range range(std::uint64_t record) const {
    const std::uint64_t shifted = record + (std::uint64_t{1} << base_log2_);
    const int top = 63 - __builtin_clzll(shifted);
    const int slab_log2 = top - split_log2_;
    const auto in_group = static_cast<int>(shifted >> slab_log2) - (1 << split_log2_);
    const std::size_t begin = (shifted & ((std::uint64_t{1} << slab_log2) - 1)) * bytes_per_record_;
    return {((top - base_log2_) << split_log2_) + in_group, begin, begin + bytes_per_record_};
  }

  // How many records from this one on lie side by side; it must exist.
  std::uint64_t run(std::uint64_t record) const {
    const std::uint64_t shifted = record + (std::uint64_t{1} << base_log2_);
    const int slab_log2 = 63 - __builtin_clzll(shifted) - split_log2_;
    return (((shifted >> slab_log2) + 1) << slab_log2) - shifted;
  }

  // Records there is room for.
  std::uint64_t capacity() const { return capacity_; }
  // Of memory.
  std::size_t bytes() const { return bytes_; }
  // Of these, what lies behind the first num_records records.
  std::size_t bytes_behind(std::uint64_t num_records) const {
    const std::size_t before = static_cast<std::size_t>(num_records) * bytes_per_record_;
    return bytes_ > before ? bytes_ - before : 0;
  }

 private:
  static constexpr std::size_t kFirstSlabBytes = 4096;
  static constexpr int kSplitLog2 = 3;

  std::size_t bytes_per_record_;
  MemoryAccount* account_;
  RowFile* file_;
  int split_log2_;
  int first_log2_ = 0;
  int base_log2_ = 0;
  std::uint64_t capacity_ = 0;
  int num_slabs_ = 0;
  std::size_t bytes_ = 0;
  // 2^34 records at least: more than 32-bit row numbers reach.
  static constexpr int kMaxSlabs = 34 << kSplitLog2;
  std::array<char*, kMaxSlabs> data_{};
  std::array<Block, kMaxSlabs> slabs_;
};

}  // namespace nestpipe
