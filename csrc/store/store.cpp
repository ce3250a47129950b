// Which keys exist: search, erasing, counters. Retrieval is in retrieval.cpp, eviction in
// eviction.cpp.
#include "nestpipe/store.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>

#include "nestpipe/parallel.h"
#include "search_range.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kKeysPerTask = 2048;
// Keys whose cache lines are requested before the first of them is read.
constexpr std::int64_t kBlock = 32;

}  // namespace

std::int64_t floats_per_row(std::int64_t embedding_words, std::int64_t state_floats) {
  const std::int64_t used = embedding_words + state_floats + 1;
  const std::int64_t unit = used * 4 < 256 ? 4 : 16;
  return (used + unit - 1) / unit * unit;
}

namespace {

// Where a record of record_bytes begins behind the used floats of a row, in floats: at 8 bytes.
std::int64_t floats_before_record(std::int64_t used) { return (used + 1) / 2 * 2; }

// Floats from a row to the next one.
std::int64_t floats_with_record(std::int64_t used, std::size_t record_bytes) {
  const auto floats = static_cast<std::int64_t>(record_bytes / sizeof(float));
  return floats_per_row(floats_before_record(used) + floats - 1, 0);
}

}  // namespace

EmbeddingStore::EmbeddingStore(const StoreConfig& config)
    : dim_(config.dim),
      data_type_(config.data_type),
      embedding_words_(nestpipe::embedding_words(config.data_type, config.dim)),
      state_floats_(config.state_floats),
      state_init_(config.state_init),
      row_floats_(floats_per_row(embedding_words_, config.state_floats)),
      used_floats_(embedding_words_ + config.state_floats + 1),
      record_floats_(floats_before_record(used_floats_)),
      stride_floats_(config.file_directory.empty()
                         ? floats_with_record(used_floats_, sizeof(Record))
                         : row_floats_),
      memory_(config.limit_bytes),
      file_(config.file_directory.empty()
                ? nullptr
                : std::make_unique<RowFile>(config.file_directory, config.file_limit_bytes,
                                            &memory_)),
      slabs_(static_cast<std::size_t>(stride_floats_) * sizeof(float), &memory_, file_.get()),
      records_(sizeof(Record), &memory_),
      ages_(sizeof(Age), &memory_),
      free_rows_(&memory_) {
  if (dim_ < 1 || state_floats_ < 0) {
    throw std::invalid_argument("store: dim must be >= 1 and state_floats >= 0");
  }
  for (const TableConfig& table : config.tables) {
    tables_.push_back(std::make_unique<Table>(table, &memory_));
    evicts_ = evicts_ || table.eviction.kind != EvictionKind::kNone;
  }
}

void EmbeddingStore::check_tables(const KeySpan& in) const {
  check_process();
  const auto num_tables = static_cast<std::uint32_t>(tables_.size());
  std::uint32_t highest = 0;
  for (std::int64_t j = 0; j < in.size; ++j) {
    highest = std::max(highest, static_cast<std::uint32_t>(in.tables[j]));
  }
  if (in.size > 0 && highest >= num_tables) {
    throw std::out_of_range("store: table indices must be in [0, " + std::to_string(num_tables) +
                            "), got " + std::to_string(static_cast<std::int32_t>(highest)));
  }
}

// Block after block: the lines of the next one are requested before this one's are read, and keys
// that are not in their home buckets wait until the next buckets' lines have come.
void EmbeddingStore::search(const KeySpan& in, std::int64_t* handles) const {
  parallel_ranges(in.size, kKeysPerTask, [&](std::int64_t begin, std::int64_t end) {
    search_range(in, begin, end, [&](std::int64_t j, std::uint32_t found) {
      handles[j] = found == kNoRow ? -1 : std::int64_t{found};
    });
  });
}

void EmbeddingStore::find(const KeySpan& in, std::int64_t* handles) const {
  check_tables(in);
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  search(in, handles);
}

void EmbeddingStore::warm(const KeySpan& in) const {
  check_tables(in);
  if (file_ == nullptr) return;
  std::vector<std::int64_t> handles(static_cast<std::size_t>(in.size));
  find(in, handles.data());
  use_rows(0, in.size, false, [&](std::int64_t j) { return handles[j]; });
}

RowFileCounters EmbeddingStore::file_counters() const {
  return file_ == nullptr ? RowFileCounters{} : file_->counters();
}

void EmbeddingStore::erase(const KeySpan& in, std::uint8_t* status) {
  check_tables(in);
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  free_limbo(std::numeric_limits<std::int64_t>::max());
  for (std::int64_t j = 0; j < in.size; ++j) {
    if (j + kBlock < in.size) {
      const KeyIndex& later = tables_[in.tables[j + kBlock]]->index;
      later.prefetch(later.hash(in.keys[j + kBlock]));
    }
    Table* const table = tables_[in.tables[j]].get();
    const std::uint32_t number = table->index.erase(table->index.hash(in.keys[j]), in.keys[j]);
    status[j] =
        static_cast<std::uint8_t>(number == kNoRow ? KeyStatus::kAbsent : KeyStatus::kFound);
    if (number != kNoRow) free_row(table, number);
  }
}

void EmbeddingStore::clear() {
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  for (const auto& table : tables_) {
    table->index = KeyIndex(table->config.hash, &memory_);
    table->counts.clear();
    table->size = 0;
    table->counters = {};
  }
  limbo_.clear();
  num_rows_.store(0, std::memory_order_relaxed);
  free_rows_.take(free_rows_.size());
  last_batch_ = -1;
}

void EmbeddingStore::clear_table(std::int64_t table) {
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  Table* const cleared = tables_.at(static_cast<std::size_t>(table)).get();
  free_limbo(std::numeric_limits<std::int64_t>::max());
  for (int shard = 0; shard < kNumShards; ++shard) {
    cleared->index.for_each_in_shard(
        shard, [&](std::int64_t, std::uint32_t row_number) { free_row(cleared, row_number); });
  }
  cleared->index = KeyIndex(cleared->config.hash, &memory_);
  cleared->counts.clear();
  cleared->counters = {};
}

void EmbeddingStore::free_row(Table* table, std::uint32_t row_number) {
  --table->size;
  *age(row_number) = kNoAge;
  free_rows_.add(row_number);
}

std::shared_lock<std::shared_mutex> EmbeddingStore::shared_keys() const {
  if (scoring_thread_.load(std::memory_order_relaxed) == std::this_thread::get_id()) {
    throw std::logic_error("store: a score function must not use the store whose rows it scores");
  }
  return std::shared_lock<std::shared_mutex>(keys_mutex_);
}

std::shared_lock<std::shared_mutex> EmbeddingStore::shared_records() const {
  for (;;) {
    std::shared_lock<std::shared_mutex> lock = shared_keys();
    if (noted_ == nullptr) return lock;
    lock.unlock();
    own_keys();
  }
}

std::unique_lock<std::shared_mutex> EmbeddingStore::own_keys() const {
  if (scoring_thread_.load(std::memory_order_relaxed) == std::this_thread::get_id()) {
    throw std::logic_error("store: a score function must not use the store whose rows it scores");
  }
  std::unique_lock<std::shared_mutex> lock(keys_mutex_);
  count_noted();
  return lock;
}

std::int64_t EmbeddingStore::size(std::int64_t table) const {
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  return tables_.at(static_cast<std::size_t>(table))->size;
}

std::int64_t EmbeddingStore::last_batch() const {
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  return last_batch_;
}

TableCounters EmbeddingStore::counters(std::int64_t table) const {
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  return tables_.at(static_cast<std::size_t>(table))->counters;
}

void EmbeddingStore::set_counters(std::int64_t table, const TableCounters& counters) {
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  tables_.at(static_cast<std::size_t>(table))->counters = counters;
}

std::int64_t EmbeddingStore::filter_blocks(std::int64_t table) const {
  return tables_.at(static_cast<std::size_t>(table))->counts.num_blocks();
}

std::int64_t EmbeddingStore::filter_cells_per_block(std::int64_t table) const {
  return tables_.at(static_cast<std::size_t>(table))->counts.cells_per_block();
}

CountsState EmbeddingStore::admission_state(std::int64_t table, int first, int end) const {
  check_shards(first, end);
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  return tables_.at(static_cast<std::size_t>(table))->counts.state(first, end);
}

void EmbeddingStore::load_admission_state(std::int64_t table, const CountsState& state) {
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  tables_.at(static_cast<std::size_t>(table))->counts.load(state);
}

StoreMemory EmbeddingStore::memory() const {
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  std::uint64_t index_bytes = 0;
  std::uint64_t admission_bytes = 0;
  std::uint64_t num_keys = 0;
  for (const auto& table : tables_) {
    for (int shard = 0; shard < kNumShards; ++shard) num_keys += table->index.size_of_shard(shard);
    index_bytes += table->index.bytes();
    admission_bytes += table->counts.bytes();
  }
  const RowFileCounters file = file_counters();
  const auto rows = static_cast<std::uint64_t>(num_rows_.load(std::memory_order_relaxed));
  const std::uint64_t untouched = slabs_.bytes_behind(rows) + records_.bytes_behind(rows) +
                                  ages_.bytes_behind(rows) + free_rows_.bytes_behind(rows);
  const std::uint64_t in_rows =
      file_ == nullptr ? slabs_.capacity() * std::uint64_t{sizeof(Record)} : 0;
  const std::uint64_t row_bytes = static_cast<std::uint64_t>(stride_floats_) * sizeof(float) -
                                  (file_ == nullptr ? sizeof(Record) : 0);
  return {index_bytes,
          slabs_.bytes() + file.resident_pages * file.page_bytes - in_rows,
          records_.bytes() + ages_.bytes() + free_rows_.bytes() + in_rows,
          admission_bytes,
          file.file_bytes,
          num_keys,
          untouched,
          row_bytes};
}

}  // namespace nestpipe
