// Where large arrays of calls wait for the next call.
#include "nestpipe/scratch.h"

#include <array>
#include <mutex>

namespace nestpipe {
namespace {

struct Shelf {
  std::mutex mutex;
  std::array<Block, 12> blocks;
  std::size_t bytes = 0;
};

// Neither is destroyed: threads may still use them while the process exits.
Shelf& shelf() {
  static Shelf* const shared = new Shelf;
  return *shared;
}

// Without a limit, and of no store.
MemoryAccount* account() {
  static MemoryAccount* const shared = new MemoryAccount;
  return shared;
}

}  // namespace

Block ScratchShelf::take(std::size_t bytes) {
  {
    // In a child of a process that forked meanwhile nobody may ever unlock it.
    const std::unique_lock<std::mutex> lock(shelf().mutex, std::try_to_lock);
    Block* best = nullptr;
    for (Block& block : shelf().blocks) {
      if (!lock.owns_lock() || block.bytes() < bytes || block.bytes() > 4 * bytes) continue;
      if (best == nullptr || block.bytes() < best->bytes()) best = &block;
    }
    if (best != nullptr) {
      shelf().bytes -= best->bytes();
      return std::move(*best);
    }
  }
  return Block(account(), bytes);
}

void ScratchShelf::give(Block block) {
  const std::unique_lock<std::mutex> lock(shelf().mutex, std::try_to_lock);
  if (!lock.owns_lock() || block.bytes() > kMostBytes - shelf().bytes) return;
  for (Block& place : shelf().blocks) {
    if (place.data() != nullptr) continue;
    shelf().bytes += block.bytes();
    place = std::move(block);
    return;
  }
}

}  // namespace nestpipe
