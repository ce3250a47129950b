// Searches for many keys at a time: while some buckets are looked at, those of the next keys are on
// their way, and so are the few that a key was not found in at home.
#pragma once

#include <algorithm>
#include <cstdint>

#include "nestpipe/store.h"

namespace nestpipe {

template <typename Note>
void EmbeddingStore::search_range(const KeySpan& in, std::int64_t begin, std::int64_t end,
                                  const Note& note) const {
  constexpr std::int64_t kBlock = 32;
  struct Block {
    std::int64_t begin = 0;
    std::int64_t count = 0;
    std::int64_t num_left = 0;
    std::uint64_t hashes[kBlock];
    std::int32_t left[kBlock];  // Offsets of keys to be looked for beyond their home buckets.
  };
  const auto request = [&](std::int64_t from, Block* block) {
    block->begin = from;
    block->count = std::max<std::int64_t>(0, std::min(kBlock, end - from));
    for (std::int64_t i = 0; i < block->count; ++i) {
      const KeyIndex& index = tables_[in.tables[from + i]]->index;
      block->hashes[i] = index.hash(in.keys[from + i]);
      index.prefetch(block->hashes[i]);
    }
  };
  const auto look_at_home = [&](Block* block) {
    block->num_left = 0;
    for (std::int64_t i = 0; i < block->count; ++i) {
      const std::int64_t j = block->begin + i;
      std::uint32_t found;
      const bool further =
          tables_[in.tables[j]]->index.find_at_home(block->hashes[i], in.keys[j], &found);
      note(j, found);
      block->left[block->num_left] = static_cast<std::int32_t>(i);
      block->num_left += further;
    }
  };
  const auto look_further = [&](const Block& block) {
    for (std::int64_t i = 0; i < block.num_left; ++i) {
      const std::int64_t j = block.begin + block.left[i];
      note(j, tables_[in.tables[j]]->index.find(block.hashes[block.left[i]], in.keys[j]));
    }
  };
  Block blocks[3];
  request(begin, &blocks[0]);
  std::int64_t number = 0;
  for (std::int64_t at = begin; at < end; at += kBlock, ++number) {
    request(at + kBlock, &blocks[(number + 1) % 3]);
    look_at_home(&blocks[number % 3]);
    look_further(blocks[(number + 2) % 3]);  // The one before; at first an empty one.
  }
  look_further(blocks[(number + 2) % 3]);
}

}  // namespace nestpipe
