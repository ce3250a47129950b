// Rows of checkpoints into a table, straight from columns: each key is looked up once and each byte
// copied once, as long as the keys are new and fit.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "by_shard.h"
#include "nestpipe/parallel.h"
#include "nestpipe/store.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kRowsPerTask = 256;

}  // namespace

void EmbeddingStore::check_columns(const std::vector<RowColumn>& columns) const {
  for (const RowColumn& column : columns) {
    if (column.offset >= 0 && column.bytes >= 0 && column.bytes <= row_floats_ * 4 &&
        column.offset <= row_floats_ * 4 - column.bytes) {
      continue;
    }
    throw std::out_of_range("store: bytes " + std::to_string(column.offset) + " to " +
                            std::to_string(column.offset + column.bytes) + " of a row of " +
                            std::to_string(row_floats_ * 4));
  }
}

// Of a column, without the padding.
std::size_t EmbeddingStore::stored_bytes(const RowColumn& column) const {
  return static_cast<std::size_t>(
      std::clamp<std::int64_t>(used_floats_ * 4 - column.offset, 0, column.bytes));
}

void EmbeddingStore::reserve_keys(std::int64_t table, std::int64_t num_keys) {
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  tables_.at(static_cast<std::size_t>(table))
      ->index.reserve(static_cast<std::uint64_t>(std::max<std::int64_t>(num_keys, 0)));
}

// Bytes of embedding, state and updates that no column fills: (offset, bytes).
std::vector<std::pair<std::int64_t, std::int64_t>> EmbeddingStore::gaps_between(
    const std::vector<RowColumn>& columns) const {
  std::vector<std::pair<std::int64_t, std::int64_t>> filled;
  for (const RowColumn& column : columns) filled.emplace_back(column.offset, column.bytes);
  std::sort(filled.begin(), filled.end());
  filled.emplace_back(used_floats_ * 4, 0);
  std::vector<std::pair<std::int64_t, std::int64_t>> gaps;
  std::int64_t at = 0;
  for (const auto& [offset, bytes] : filled) {
    if (offset > at) gaps.emplace_back(at, offset - at);
    at = std::max(at, offset + bytes);
  }
  return gaps;
}

std::int64_t EmbeddingStore::load_columns(std::int64_t table, const std::int64_t* keys,
                                          std::int64_t size, const std::vector<RowColumn>& columns,
                                          const MetadataSpan& metadata) {
  check_columns(columns);
  if (table < 0 || table >= num_tables()) {
    throw std::out_of_range("store: there is no table " + std::to_string(table));
  }
  const auto gaps = gaps_between(columns);
  const auto assemble = [&](std::int64_t j, char* row) {
    for (const RowColumn& column : columns) {
      std::memcpy(row + column.offset, column.data + j * column.bytes, stored_bytes(column));
    }
    for (const auto& [offset, bytes] : gaps) {
      std::memset(row + offset, 0, static_cast<std::size_t>(bytes));
    }
  };
  if (load_new(table, keys, size, metadata, assemble)) return -1;
  std::vector<float> rows(static_cast<std::size_t>(size * row_floats_));
  for (std::int64_t j = 0; j < size; ++j) {
    assemble(j, reinterpret_cast<char*>(rows.data() + j * row_floats_));
  }
  const std::vector<std::int32_t> tables(static_cast<std::size_t>(size),
                                         static_cast<std::int32_t>(table));
  return load_rows({keys, tables.data(), size}, rows.data(), metadata);
}

// False, with nothing changed, if a key is there already or comes twice, or the quota is too small.
bool EmbeddingStore::load_new(std::int64_t table_number, const std::int64_t* keys,
                              std::int64_t size, const MetadataSpan& metadata,
                              const std::function<void(std::int64_t, char*)>& assemble) {
  check_process();
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  Table& table = *tables_[static_cast<std::size_t>(table_number)];
  const std::int64_t num_rows = num_rows_.load(std::memory_order_relaxed);
  const std::int64_t reused = std::min(size, free_rows_.size());
  if (table.config.quota >= 0 && size > table.config.quota - table.size) return false;
  if (size >= std::int64_t{kNoRow} - num_rows) return false;
  reserve_rows(static_cast<std::uint64_t>(num_rows + size - reused));
  // As in retrieve: free rows, then new ones, in input order.
  const Scratch<std::uint32_t> free(reused);
  free_rows_.lowest(reused, free.get());
  const auto number = [&](std::int64_t j) {
    return j < reused ? free[j] : static_cast<std::uint32_t>(num_rows + j - reused);
  };
  std::vector<std::uint64_t> hashes(static_cast<std::size_t>(size));
  for (std::int64_t j = 0; j < size; ++j) hashes[j] = table.index.hash(keys[j]);
  std::vector<std::uint8_t> entered(static_cast<std::size_t>(size), 0);
  const auto withdraw = [&] {
    for (std::int64_t j = 0; j < size; ++j) {
      if (entered[j] != 0) table.index.erase(hashes[j], keys[j]);
    }
  };
  ByShard by_shard;
  by_shard.assign(static_cast<std::uint32_t>(size), [&](std::uint32_t i) { return hashes[i]; });
  try {
    by_shard.for_each([&](std::uint32_t i) { table.index.prefetch(hashes[i]); },
                      [&](std::uint32_t i) {
                        entered[i] = table.index.insert(hashes[i], keys[i], number(i)) == kNoRow;
                      });
  } catch (...) {
    withdraw();
    throw;
  }
  if (std::find(entered.begin(), entered.end(), 0) != entered.end()) {
    withdraw();
    return false;
  }
  const auto fill = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) {
      const std::uint32_t to = number(j);
      assemble(j, reinterpret_cast<char*>(row(to)));
      *record(to) = Record{keys[j], metadata.last_used[j], metadata.frequency[j],
                           static_cast<std::int32_t>(table_number)};
      *age(to) = age_of(metadata.last_used[j]);
    }
  };
  const auto handle = [&](std::int64_t j) { return std::int64_t{number(j)}; };
  for_row_ranges(size, kRowsPerTask, true, handle, fill);
  for (std::int64_t j = 0; j < size; ++j)
    last_batch_ = std::max(last_batch_, metadata.last_used[j]);
  num_rows_.store(num_rows + size - reused, std::memory_order_relaxed);
  free_rows_.take(reused);
  table.size += size;
  newest_ = ++sequence_;
  return true;
}

}  // namespace nestpipe
