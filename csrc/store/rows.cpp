// Rows and their records by handle: copies in and out, no search.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "nestpipe/parallel.h"
#include "nestpipe/request_line.h"
#include "nestpipe/store.h"
#include "stream_rows.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kRowsPerTask = 256;
constexpr std::int64_t kAhead = 8;  // Rows whose first line is requested before they are copied.

constexpr std::int64_t kFarAhead =
    32;  // Rows of which all lines are requested, for the second cache.

void request_row(const float* row, std::int64_t num_floats) {
  constexpr std::int64_t kFloatsPerLine = 16;
  constexpr std::int64_t kMaxFloats = 8 * kFloatsPerLine;
  const std::int64_t last = std::min(num_floats, kMaxFloats);
  for (std::int64_t d = 0; d < last; d += kFloatsPerLine) request_line_early(row + d);
}

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
  // All at once, as unsigned numbers from -1 on; which one it is only where one is wrong.
  std::uint64_t highest = 0;
  for (std::int64_t j = 0; j < size; ++j) {
    highest = std::max(highest, static_cast<std::uint64_t>(handles[j]) + 1);
  }
  if (highest <= static_cast<std::uint64_t>(num_rows)) return;
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
  out[used_floats_ - 1] = 0.0f;  // `updates`: the bits are those of int32 0.
}

void EmbeddingStore::absent_row(std::int32_t table, std::int64_t key, float* out) const {
  initial_row(table, key, out);
  std::fill(out + used_floats_, out + row_floats_, 0.0f);
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
    if (j + kAhead < end && handles[j + kAhead] >= 0) request_line(row(handles[j + kAhead]));
    float* const to = out + (index == nullptr ? j : index[j]) * row_floats_;
    if (handles[j] >= 0) {
      std::memcpy(to, row(handles[j]), static_cast<std::size_t>(used_floats_) * sizeof(float));
      std::fill(to + used_floats_, to + row_floats_, 0.0f);
    } else {
      absent_row(in.tables[j], in.keys[j], to);
    }
  };
  for_row_ranges(in.size, kRowsPerTask, false, at(handles), each(copy));
}

void EmbeddingStore::write_back(const std::int64_t* handles, std::int64_t size, const float* rows) {
  check_handles(handles, size);
  const auto bytes = static_cast<std::size_t>(used_floats_) * sizeof(float);
  const auto copy = [&](std::int64_t j, std::int64_t end) {
    if (j + kAhead < end && handles[j + kAhead] >= 0) {
      request_line_to_write(row(handles[j + kAhead]));
    }
    if (handles[j] >= 0) std::memcpy(row(handles[j]), rows + j * row_floats_, bytes);
  };
  for_row_ranges(size, kRowsPerTask, true, at(handles), each(copy));
}

EmbeddingStore::EmbeddingWriter EmbeddingStore::writer(float* out, std::int64_t num_rows) const {
  const std::int64_t row_bytes = dim_ * static_cast<std::int64_t>(sizeof(float));
  const bool stream = data_type_ == DataType::kFloat32 && worth_streaming(out, row_bytes, num_rows);
  return {data_type_, dim_, out, stream};
}

void EmbeddingStore::EmbeddingWriter::to(const float* words, std::int64_t j) const {
  if (stream) {
    stream_row(words, dim * static_cast<std::int64_t>(sizeof(float)), out + j * dim);
  } else {
    unpack_embedding(data_type, words, dim, out + j * dim);
  }
}

void EmbeddingStore::EmbeddingWriter::finish() const {
  if (stream) end_streaming();
}

void EmbeddingStore::read_embeddings(const std::int64_t* handles, const KeySpan& in,
                                     float* out) const {
  check_tables(in);
  check_handles(handles, in.size);
  copy_embeddings(handles, in, nullptr, out);
}

void EmbeddingStore::copy_embeddings(const std::int64_t* handles, const KeySpan& in,
                                     const std::uint8_t* status, float* out) const {
  constexpr auto kInserted = static_cast<std::uint8_t>(KeyStatus::kInserted);
  const auto left_out = [status](std::int64_t j) {
    return status != nullptr && status[j] == kInserted;
  };
  const EmbeddingWriter copy_out = writer(out, in.size);
  const auto copy = [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> words(static_cast<std::size_t>(embedding_words_));
    for (std::int64_t j = begin; j < end; ++j) {
      const std::int64_t later = j + kFarAhead;
      if (later < end && handles[later] >= 0 && !left_out(later)) {
        request_row(row(handles[later]), embedding_words_);
      }
      if (left_out(j)) continue;
      if (handles[j] < 0) absent_embedding(in.tables[j], in.keys[j], words.data());
      copy_out.to(handles[j] >= 0 ? row(handles[j]) : words.data(), j);
    }
    copy_out.finish();
  };
  const auto handle = [&](std::int64_t j) { return left_out(j) ? -1 : handles[j]; };
  for_row_ranges(in.size, kRowsPerTask, false, handle, copy);
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
  const std::shared_lock<std::shared_mutex> lock = shared_records();
  for (std::int64_t j = 0; j < size; ++j) {
    if (j + 2 * kAhead < size && handles[j + 2 * kAhead] >= 0) {
      request_line(record(handles[j + 2 * kAhead]));
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
