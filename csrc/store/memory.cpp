// Counted blocks of zeroed memory: small ones from the heap, large ones as pages.
#include "nestpipe/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace nestpipe {
namespace {

constexpr std::size_t kAlignment = 64;
// From here on a block is worth its own pages: what is freed then leaves the process.
constexpr std::size_t kPagesFrom = std::size_t{256} << 10;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

void* allocate(std::size_t bytes) {
  if (bytes < kPagesFrom) {
    void* data = std::aligned_alloc(kAlignment, bytes);
    if (data == nullptr) throw std::bad_alloc();
    return std::memset(data, 0, bytes);
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (bytes >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);  // A hint: refusal changes nothing.
#endif
  return data;
}

void release(void* data, std::size_t bytes) {
  if (bytes < kPagesFrom) {
    std::free(data);
  } else {
    munmap(data, bytes);
  }
}

}  // namespace

void MemoryAccount::add(std::size_t bytes) {
  const std::size_t before = used_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  if (before > limit_bytes_ || bytes > limit_bytes_ - before) {
    remove(bytes);
    throw std::bad_alloc();
  }
}

Block::Block(MemoryAccount* account, std::size_t bytes) {
  if (bytes > std::numeric_limits<std::size_t>::max() - kAlignment) throw std::bad_alloc();
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (bytes == 0) return;
  account->add(bytes);
  try {
    data_ = allocate(bytes);
  } catch (...) {
    account->remove(bytes);
    throw;
  }
  account_ = account;
  bytes_ = bytes;
}

Block::~Block() {
  if (data_ == nullptr) return;
  release(data_, bytes_);
  account_->remove(bytes_);
}

void prefer_huge_pages(void* data, std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr std::size_t kWorthACall = 2 * kHugePage;
  const auto begin =
      (reinterpret_cast<std::uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (bytes >= kWorthACall && begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
#endif
}

}  // namespace nestpipe
