// The rows that one retrieval takes out of the index: between planning and doing.
#pragma once

#include <cstdint>
#include <vector>

#include "by_shard.h"
#include "nestpipe/store.h"

namespace nestpipe {

struct EmbeddingStore::Departure {
  std::vector<EvictionCandidate> rows;
  std::vector<std::int64_t> expired;   // [tables] how many of the rows
  std::vector<std::int64_t> evicted;   // [tables] the others
  std::vector<std::uint32_t> numbers;  // Of rows, for limbo.
  ByShard by_shard;                    // Of rows.

  std::int64_t leaving(std::size_t table) const {
    return expired.empty() ? 0 : expired[table] + evicted[table];
  }
};

}  // namespace nestpipe
