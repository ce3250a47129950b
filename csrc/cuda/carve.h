// Arrays cut from one block of working memory, each on a boundary of 256 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nestpipe {
namespace cuda {

// With a null base it only counts bytes.
class Carve {
 public:
  explicit Carve(void* base) : base_(static_cast<unsigned char*>(base)) {}

  template <typename T>
  T* take(std::int64_t count) {
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    used_ += (bytes + 255) / 256 * 256;
    return array;
  }

  std::size_t used() const { return used_; }

 private:
  unsigned char* base_;
  std::size_t used_ = 0;
};

}  // namespace cuda
}  // namespace nestpipe
