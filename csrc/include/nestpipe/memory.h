// Blocks of zeroed memory that are counted, may be limited, and go back to the system when freed.
#pragma once

#include <atomic>
#include <cstddef>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>

namespace nestpipe {

// How much one owner has allocated, and how much it may. Several threads may allocate at the same
// time.
class MemoryAccount {
 public:
  explicit MemoryAccount(std::size_t limit_bytes = std::numeric_limits<std::size_t>::max())
      : limit_bytes_(limit_bytes) {}

  // Throws std::bad_alloc, and counts nothing, where the limit would be passed.
  void add(std::size_t bytes);
  void remove(std::size_t bytes) { used_bytes_.fetch_sub(bytes, std::memory_order_relaxed); }
  std::size_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }

 private:
  const std::size_t limit_bytes_;
  std::atomic<std::size_t> used_bytes_{0};
};

// Owns `bytes` zeroed bytes, aligned to 64. Large blocks are pages of their own, huge ones where
// the system has them, so that freeing returns them at once.
class Block {
 public:
  Block() = default;
  Block(MemoryAccount* account, std::size_t bytes);
  Block(Block&& other) noexcept { swap(other); }
  Block& operator=(Block&& other) noexcept {
    Block taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~Block();

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(Block& other) noexcept {
    std::swap(account_, other.account_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  MemoryAccount* account_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Zeroed memory for arrays of some tens of KB to a few MB: side by side in chunks of whole huge
// pages, as each by itself would lie on small ones. A chunk goes back to the system with the last
// array in it, so arrays should go in about the order in which they came. Several threads may take
// arrays at the same time.
class ChunkedArrays {
 public:
  // Owns `bytes` zeroed bytes, aligned to 64.
  class Array {
   public:
    void* data() const { return data_; }
    // The chunk that it lies in.
    const std::shared_ptr<Block>& chunk() const { return chunk_; }

   private:
    friend class ChunkedArrays;
    std::shared_ptr<Block> chunk_;
    void* data_ = nullptr;
  };

  explicit ChunkedArrays(MemoryAccount* account) : account_(account) {}

  // Throws std::bad_alloc.
  Array take(std::size_t bytes);
  // The chunk that the next array is likely to lie in, or null.
  std::shared_ptr<Block> newest() const;

 private:
  MemoryAccount* account_;
  mutable std::mutex mutex_;
  std::shared_ptr<Block> chunk_;
  std::size_t used_bytes_ = 0;  // Of the chunk.
};

// Asks for huge pages where memory that is about to be written for the first time holds some: as
// small ones, pages the system hands out anew cost more than writing them. A hint.
void prefer_huge_pages(void* data, std::size_t bytes);

}  // namespace nestpipe
