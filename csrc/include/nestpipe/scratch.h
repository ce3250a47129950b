// Arrays that live for one call: large ones on huge pages, so that touching them for the first time
// costs a fault for each 2 MB and not for each 4 KB.
#pragma once

#include <cstdint>
#include <memory>

#include "nestpipe/memory.h"

namespace nestpipe {

// T needs neither constructor nor destructor; the values are not initialized.
template <typename T>
class Scratch {
 public:
  Scratch() = default;
  // Throws std::bad_alloc.
  explicit Scratch(std::int64_t size) {
    const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(T);
    if (bytes >= kOwnPagesFrom) {
      pages_ = Block(account(), bytes);
      data_ = static_cast<T*>(pages_.data());
    } else {
      small_.reset(new T[static_cast<std::size_t>(size)]);
      data_ = small_.get();
    }
  }

  T* get() const { return data_; }
  T& operator[](std::int64_t i) const { return data_[i]; }
  bool empty() const { return data_ == nullptr; }

 private:
  static constexpr std::size_t kOwnPagesFrom = std::size_t{2} << 20;

  // Without a limit, and of no store.
  static MemoryAccount* account() {
    static MemoryAccount* const shared = new MemoryAccount;  // Outlives all arrays.
    return shared;
  }

  Block pages_;
  std::unique_ptr<T[]> small_;
  T* data_ = nullptr;
};

}  // namespace nestpipe
