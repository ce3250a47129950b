// Rows and their records by handle: copies in and out, no search.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "nestpipe/parallel.h"
#include "nestpipe/store.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kRowsPerTask = 256;
constexpr std::int64_t kAhead = 8;  // Rows whose first line is requested before they are copied.

// body(begin, end) out of one(j, end) for each row j of the range.
template <typename One>
auto each(const One& one) {
  return [one](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) one(j, end);
  };
}

auto at(const std::int64_t* handles) {
  return [handles](std::int64_t j) { return handles[j]; };
}

}  // namespace

void EmbeddingStore::check_handles(const std::int64_t* handles, std::int64_t size) const {
  check_process();
  const std::int64_t num_rows = num_rows_.load(std::memory_order_relaxed);
  for (std::int64_t j = 0; j < size; ++j) {
    if (handles[j] >= -1 && handles[j] < num_rows) continue;
    throw std::out_of_range("store: row handles must be in [-1, " + std::to_string(num_rows) +
                            "), got " + std::to_string(handles[j]) + " at position " +
                            std::to_string(j));
  }
}

// Computed in float32, rounded to nearest once.
void EmbeddingStore::make_embedding(const Initializer& init, std::int32_t table, std::int64_t key,
                                    float* words) const {
  const TableConfig& config = tables_[table]->config;
  if (data_type_ == DataType::kFloat32) {
    initial_values(init, config.seed, config.hash, key, dim_, words);
    return;
  }
  std::vector<float> values(static_cast<std::size_t>(dim_));
  initial_values(init, config.seed, config.hash, key, dim_, values.data());
  pack_embedding(data_type_, values.data(), dim_, words);
}

void EmbeddingStore::initial_row(std::int32_t table, std::int64_t key, float* out) const {
  make_embedding(tables_[table]->config.init, table, key, out);
  float* const state = out + embedding_words_;
  for (std::int64_t i = 0; i < state_floats_; ++i) state[i] = state_init_;
  // `updates` and padding: the bits of 0.0f are those of int32 0.
  for (std::int64_t i = embedding_words_ + state_floats_; i < row_floats_; ++i) out[i] = 0.0f;
}

void EmbeddingStore::absent_row(std::int32_t table, std::int64_t key, float* out) const {
  initial_row(table, key, out);
  if (tables_[table]->config.has_absent) absent_embedding(table, key, out);
}

void EmbeddingStore::absent_embedding(std::int32_t table, std::int64_t key, float* out) const {
  const TableConfig& config = tables_[table]->config;
  const Initializer& init = config.has_absent ? config.absent : config.init;
  make_embedding(init, table, key, out);
}

void EmbeddingStore::gather(const std::int64_t* handles, const KeySpan& in,
                            const std::int64_t* index, float* out, std::int64_t num_out) const {
  check_tables(in);
  check_handles(handles, in.size);
  for (std::int64_t j = 0; j < in.size; ++j) {
    const std::int64_t to = index == nullptr ? j : index[j];
    if (to >= 0 && to < num_out) continue;
    throw std::out_of_range("store: gather to row " + std::to_string(to) + " of a buffer of " +
                            std::to_string(num_out));
  }
  const auto copy = [&](std::int64_t j, std::int64_t end) {
    if (j + kAhead < end && handles[j + kAhead] >= 0) __builtin_prefetch(row(handles[j + kAhead]));
    float* const to = out + (index == nullptr ? j : index[j]) * row_floats_;
    if (handles[j] >= 0) {
      std::memcpy(to, row(handles[j]), static_cast<std::size_t>(row_floats_) * sizeof(float));
    } else {
      absent_row(in.tables[j], in.keys[j], to);
    }
  };
  for_row_ranges(in.size, kRowsPerTask, false, at(handles), each(copy));
}

void EmbeddingStore::write_back(const std::int64_t* handles, std::int64_t size, const float* rows) {
  check_handles(handles, size);
  const auto bytes = static_cast<std::size_t>(embedding_words_ + state_floats_ + 1) * sizeof(float);
  const auto copy = [&](std::int64_t j, std::int64_t end) {
    if (j + kAhead < end && handles[j + kAhead] >= 0) {
      __builtin_prefetch(row(handles[j + kAhead]), 1);
    }
    if (handles[j] >= 0) std::memcpy(row(handles[j]), rows + j * row_floats_, bytes);
  };
  for_row_ranges(size, kRowsPerTask, true, at(handles), each(copy));
}

void EmbeddingStore::read_embeddings(const std::int64_t* handles, const KeySpan& in,
                                     float* out) const {
  check_tables(in);
  check_handles(handles, in.size);
  const auto unpack = [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> words(static_cast<std::size_t>(embedding_words_));
    for (std::int64_t j = begin; j < end; ++j) {
      if (j + kAhead < end && handles[j + kAhead] >= 0) {
        __builtin_prefetch(row(handles[j + kAhead]));
      }
      const float* from = words.data();
      if (handles[j] >= 0) {
        from = row(handles[j]);
      } else {
        absent_embedding(in.tables[j], in.keys[j], words.data());
      }
      unpack_embedding(data_type_, from, dim_, out + j * dim_);
    }
  };
  for_row_ranges(in.size, kRowsPerTask, false, at(handles), unpack);
}

void EmbeddingStore::write_embeddings(const std::int64_t* handles, std::int64_t size,
                                      const float* values) {
  check_handles(handles, size);
  const auto pack = [&](std::int64_t j, std::int64_t) {
    if (handles[j] >= 0) pack_embedding(data_type_, values + j * dim_, dim_, row(handles[j]));
  };
  for_row_ranges(size, kRowsPerTask, true, at(handles), each(pack));
}

void EmbeddingStore::read_metadata(const std::int64_t* handles, std::int64_t size,
                                   const MetadataSpan& out) const {
  check_handles(handles, size);
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  for (std::int64_t j = 0; j < size; ++j) {
    if (j + 2 * kAhead < size && handles[j + 2 * kAhead] >= 0) {
      __builtin_prefetch(record(handles[j + 2 * kAhead]));
    }
    out.last_used[j] = handles[j] < 0 ? -1 : record(handles[j])->last_used;
    out.frequency[j] = handles[j] < 0 ? 0 : record(handles[j])->frequency;
  }
}

void EmbeddingStore::write_metadata(const std::int64_t* handles, std::int64_t size,
                                    const MetadataSpan& in) {
  check_handles(handles, size);
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  for (std::int64_t j = 0; j < size; ++j) {
    if (handles[j] < 0) continue;
    last_batch_ = std::max(last_batch_, in.last_used[j]);
    if (*age(handles[j]) != kNoAge) set_last_used(handles[j], in.last_used[j]);
    record(handles[j])->frequency = in.frequency[j];
  }
}

void EmbeddingStore::export_table(std::int64_t table, std::vector<std::int64_t>* keys,
                                  std::vector<std::int64_t>* handles) const {
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  keys->clear();
  handles->clear();
  const std::int64_t num_rows = num_rows_.load(std::memory_order_relaxed);
  for (std::int64_t handle = 0; handle < num_rows; ++handle) {
    if (*age(handle) == kNoAge || record(handle)->table != table) continue;
    keys->push_back(record(handle)->key);
    handles->push_back(handle);
  }
}

}  // namespace nestpipe
