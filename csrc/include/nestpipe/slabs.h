// An array of records that grows without moving any: slabs of 2^k times the first one's records.
//
// Record r lies in slab k = floor(log2(r / first + 1)), where `first` is the first slab's number of
// records, a power of two chosen so that it takes about 4 KB. The directory has a fixed size, so an
// address may be computed while another thread adds slabs. Slabs lie in memory, or in a file.
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
      : bytes_per_record_(bytes_per_record), account_(account), file_(file) {
    while ((std::size_t{2} << first_log2_) * bytes_per_record <= kFirstSlabBytes) ++first_log2_;
  }

  // Makes records 0 .. num_records - 1 exist. Throws std::bad_alloc, FileError; what exists stays.
  void reserve(std::uint64_t num_records) {
    while (capacity() < num_records) {
      const std::size_t bytes = (std::size_t{1} << (first_log2_ + num_slabs_)) * bytes_per_record_;
      if (file_ != nullptr) {
        data_[num_slabs_] = file_->add_slab(bytes);
      } else {
        slabs_[num_slabs_] = Block(account_, bytes);
        data_[num_slabs_] = static_cast<char*>(slabs_[num_slabs_].data());
        bytes_ += slabs_[num_slabs_].bytes();
      }
      ++num_slabs_;
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
    const std::uint64_t shifted = record + (std::uint64_t{1} << first_log2_);
    const int top = 63 - __builtin_clzll(shifted);
    const std::size_t begin = (shifted - (std::uint64_t{1} << top)) * bytes_per_record_;
    return {top - first_log2_, begin, begin + bytes_per_record_};
  }

  // How many records from this one on lie side by side; it must exist.
  std::uint64_t run(std::uint64_t record) const {
    const std::uint64_t shifted = record + (std::uint64_t{1} << first_log2_);
    return (std::uint64_t{2} << (63 - __builtin_clzll(shifted))) - shifted;
  }

  // Of memory.
  std::size_t bytes() const { return bytes_; }
  // Of these, what lies behind the first num_records records.
  std::size_t bytes_behind(std::uint64_t num_records) const {
    const std::size_t before = static_cast<std::size_t>(num_records) * bytes_per_record_;
    return bytes_ > before ? bytes_ - before : 0;
  }

 private:
  static constexpr std::size_t kFirstSlabBytes = 4096;

  std::uint64_t capacity() const { return ((std::uint64_t{1} << num_slabs_) - 1) << first_log2_; }

  std::size_t bytes_per_record_;
  MemoryAccount* account_;
  RowFile* file_;
  int first_log2_ = 0;
  int num_slabs_ = 0;
  std::size_t bytes_ = 0;
  // 2^34 records of the first slab's size: more than 32-bit row numbers reach.
  static constexpr int kMaxSlabs = 34;
  std::array<char*, kMaxSlabs> data_{};
  std::array<Block, kMaxSlabs> slabs_;
};

}  // namespace nestpipe
