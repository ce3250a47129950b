// Working memory of one call, which the next call finds warm: pages that the system hands out anew
// cost more than the work in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "nestpipe/memory.h"

namespace nestpipe {

// One block, taken from the shelf if one of the size lies there. The shelf holds one block of at
// most kMaxKept bytes for the process. Contents are arbitrary.
class Scratch {
 public:
  static constexpr std::size_t kMaxKept = std::size_t{32} << 20;

  explicit Scratch(std::size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // The next `size` entries of the block, at a line of their own.
  template <typename T>
  T* take(std::int64_t size) {
    T* taken = reinterpret_cast<T*>(static_cast<char*>(block_->data()) + used_);
    used_ += bytes_for<T>(size);
    return taken;
  }
  template <typename T>
  static std::size_t bytes_for(std::int64_t size) {
    return (static_cast<std::size_t>(size) * sizeof(T) + 63) / 64 * 64;
  }

 private:
  Block* block_;
  std::size_t used_ = 0;
};

}  // namespace nestpipe
