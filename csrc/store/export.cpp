// The keys of a table by groups of index shards, in an order that depends on the keys alone, and
// their rows by columns: what checkpoints are written from.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "nestpipe/parallel.h"
#include "nestpipe/request_line.h"
#include "nestpipe/store.h"

namespace nestpipe {

void EmbeddingStore::check_shards(int first, int end) {
  if (first < 0 || end > kNumShards || first > end) {
    throw std::out_of_range("store: index shards must lie in [0, 256], got " +
                            std::to_string(first) + " to " + std::to_string(end));
  }
}

void EmbeddingStore::shard_sizes(std::int64_t table, std::int64_t* sizes) const {
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  const KeyIndex& index = tables_.at(static_cast<std::size_t>(table))->index;
  for (int shard = 0; shard < kNumShards; ++shard) sizes[shard] = index.size_of_shard(shard);
}

std::int64_t EmbeddingStore::export_shards(std::int64_t table, int first, int end,
                                           std::int64_t capacity, std::int64_t* keys,
                                           std::int64_t* handles) const {
  check_shards(first, end);
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  const KeyIndex& index = tables_.at(static_cast<std::size_t>(table))->index;
  std::vector<std::vector<std::pair<std::int64_t, std::uint32_t>>> shards(end - first);
  parallel_tasks(end - first, [&](std::int64_t i) {
    shards[i].reserve(index.size_of_shard(first + static_cast<int>(i)));
    index.for_each_in_shard(first + static_cast<int>(i), [&](std::int64_t key, std::uint32_t row) {
      shards[i].emplace_back(key, row);
    });
    std::sort(shards[i].begin(), shards[i].end());
  });
  std::int64_t count = 0;
  for (const auto& shard : shards) count += static_cast<std::int64_t>(shard.size());
  if (count > capacity) {
    throw std::length_error("store: " + std::to_string(count) + " keys do not fit into " +
                            std::to_string(capacity));
  }
  for (const auto& shard : shards) {
    for (const auto& [key, row] : shard) {
      *keys++ = key;
      *handles++ = row;
    }
  }
  return count;
}

void EmbeddingStore::copy_columns(const std::int64_t* handles, std::int64_t size,
                                  const std::vector<RowColumn>& columns) const {
  constexpr std::int64_t kRowsPerTask = 256;
  constexpr std::int64_t kAhead = 8;  // Rows that are requested before they are copied.
  constexpr std::int64_t kFloatsPerLine = 16;
  const std::int64_t requested = std::min<std::int64_t>(row_floats_, 16 * kFloatsPerLine);
  check_handles(handles, size);
  check_columns(columns);
  if (std::find(handles, handles + size, -1) != handles + size) {
    throw std::out_of_range("store: there is no row to copy from for handle -1");
  }
  const auto copy = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) {
      if (j + kAhead < end) {
        const float* const later = row(handles[j + kAhead]);
        for (std::int64_t d = 0; d < requested; d += kFloatsPerLine) request_line(later + d);
      }
      const auto* const from = reinterpret_cast<const char*>(row(handles[j]));
      for (const RowColumn& column : columns) {
        const std::size_t stored = stored_bytes(column);
        char* const to = column.data + j * column.bytes;
        std::memcpy(to, from + column.offset, stored);
        std::memset(to + stored, 0, static_cast<std::size_t>(column.bytes) - stored);
      }
    }
  };
  const auto handle = [handles](std::int64_t j) { return handles[j]; };
  for_row_ranges(size, kRowsPerTask, false, handle, copy);
}

}  // namespace nestpipe
