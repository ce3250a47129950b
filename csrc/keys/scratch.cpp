// The shelf that working memory goes back to.
#include "scratch.h"

#include <atomic>

namespace nestpipe {
namespace {

MemoryAccount account;
std::atomic<Block*> shelf{nullptr};

}  // namespace

Scratch::Scratch(std::size_t bytes) : block_(shelf.exchange(nullptr, std::memory_order_acquire)) {
  if (block_ != nullptr && block_->bytes() >= bytes) return;
  delete block_;
  block_ = new Block(&account, bytes);
}

Scratch::~Scratch() {
  Block* spare = block_;
  if (spare->bytes() <= kMaxKept) spare = shelf.exchange(spare, std::memory_order_acq_rel);
  delete spare;
}

}  // namespace nestpipe
