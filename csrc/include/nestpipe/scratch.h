// Arrays that live for one call: large ones on huge pages, so that touching them for the first time
// costs a fault for each 2 MB and not for each 4 KB. A few of those stay with the process for the
// next call, as pages that the system hands out anew cost more than most work in them.
#pragma once

#include <cstdint>
#include <memory>

#include "nestpipe/memory.h"

namespace nestpipe {

// Blocks between calls: at most kMostBytes in all. Any thread may take and give.
class ScratchShelf {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{64} << 20;

  // A block of at least so many bytes, with arbitrary contents. Throws std::bad_alloc.
  static Block take(std::size_t bytes);
  static void give(Block block);
};

// T needs neither constructor nor destructor; the values are not initialized.
template <typename T>
class Scratch {
 public:
  Scratch() = default;
  // Throws std::bad_alloc.
  explicit Scratch(std::int64_t size) {
    const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(T);
    if (bytes >= kOwnPagesFrom) {
      pages_ = ScratchShelf::take(bytes);
      data_ = static_cast<T*>(pages_.data());
    } else {
      small_.reset(new T[static_cast<std::size_t>(size)]);
      data_ = small_.get();
    }
  }
  Scratch(Scratch&& other) noexcept { swap(other); }
  Scratch& operator=(Scratch&& other) noexcept {
    Scratch taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~Scratch() {
    if (pages_.data() != nullptr) ScratchShelf::give(std::move(pages_));
  }

  T* get() const { return data_; }
  T& operator[](std::int64_t i) const { return data_[i]; }
  bool empty() const { return data_ == nullptr; }

 private:
  static constexpr std::size_t kOwnPagesFrom = std::size_t{2} << 20;

  void swap(Scratch& other) noexcept {
    std::swap(pages_, other.pages_);
    std::swap(small_, other.small_);
    std::swap(data_, other.data_);
  }

  Block pages_;
  std::unique_ptr<T[]> small_;
  T* data_ = nullptr;
};

}  // namespace nestpipe
