// Counted blocks of zeroed memory: small ones from the heap, large ones as pages.
#include "nestpipe/memory.h"

#include <sys/mman.h>
#include <unistd.h>

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
const std::size_t kSmallPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
// Arrays that lie in chunks with others, and how many of a size a chunk holds.
constexpr std::size_t kChunksFrom = std::size_t{256} << 10;
constexpr std::size_t kChunksTo = std::size_t{4} << 20;
constexpr std::size_t kArraysPerChunk = 8;

void* map_pages(std::size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  return data;
}

void* allocate(std::size_t bytes) {
  if (bytes < kPagesFrom) {
    void* data = std::aligned_alloc(kAlignment, bytes);
    if (data == nullptr) throw std::bad_alloc();
    return std::memset(data, 0, bytes);
  }
  if (bytes < kHugePage) return map_pages(bytes);
  // From the first huge page's beginning in somewhat more.
  auto* const data = static_cast<char*>(map_pages(bytes + kHugePage));
  const std::size_t past = reinterpret_cast<std::uintptr_t>(data) % kHugePage;
  const std::size_t before = past == 0 ? 0 : kHugePage - past;
  const std::size_t kept = (bytes + kSmallPage - 1) / kSmallPage * kSmallPage;
  if (before != 0) munmap(data, before);
  munmap(data + before + kept, kHugePage - before + bytes - kept);
#ifdef MADV_HUGEPAGE
  madvise(data + before, bytes, MADV_HUGEPAGE);  // A hint: refusal changes nothing.
#endif
  return data + before;
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

ChunkedArrays::Array ChunkedArrays::take(std::size_t bytes) {
  Array taken;
  if (bytes < kChunksFrom || bytes > kChunksTo) {
    taken.chunk_ = std::make_shared<Block>(account_, bytes);
    taken.data_ = taken.chunk_->data();
    return taken;
  }
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard<std::mutex> guard(mutex_);
  if (chunk_ == nullptr || chunk_->bytes() - used_bytes_ < bytes) {
    // The next ones are likely to be a little longer.
    const std::size_t wanted = kArraysPerChunk * (bytes + bytes / 64);
    const std::size_t pages = (wanted + kHugePage - 1) / kHugePage;
    chunk_ = std::make_shared<Block>(account_, pages * kHugePage);
    used_bytes_ = 0;
  }
  taken.chunk_ = chunk_;
  taken.data_ = static_cast<char*>(chunk_->data()) + used_bytes_;
  used_bytes_ += bytes;
  return taken;
}

std::shared_ptr<Block> ChunkedArrays::newest() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return chunk_;
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
