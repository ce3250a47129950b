// The rows that one retrieval takes out of the index: between planning and doing.
#pragma once

#include <cstdint>
#include <vector>

#include "nestpipe/store.h"

namespace nestpipe {

struct EmbeddingStore::Departure {
  struct Row {
    std::uint64_t hash;
    std::uint32_t number;
    std::int32_t table;
  };
  std::vector<std::int64_t> expired;     // [tables] how many of the rows
  std::vector<std::int64_t> evicted;     // [tables] the others
  std::vector<Row> leaving;              // Grouped by index shard.
  std::vector<std::int64_t> shard_ends;  // [kNumShards + 1]
  std::vector<std::uint32_t> numbers;    // Of the rows, mostly ascending: for limbo.

  std::int64_t size_of(std::size_t table) const {
    return expired.empty() ? 0 : expired[table] + evicted[table];
  }
};

}  // namespace nestpipe
