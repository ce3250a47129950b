// Which keys exist: search, retrieval, undo, erasing.
//
// Inserting takes four passes over the keys that a search did not find, none of which depends on
// the number of threads:
//   1. grouped by shard, each key enters its index with its position among the missing as
//   provisional row number; a key that is
//      there already is a repetition of an earlier one;
//   2. one thread numbers the rows in input order, within the quotas, and makes room for them;
//   3. grouped by shard, provisional numbers become row numbers; refused keys leave the index;
//   4. rows and records are written.
// Memory is allocated in passes 1 and 2 only, and a failure there takes the provisional entries out
// again.
#include "nestpipe/store.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "nestpipe/parallel.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kKeysPerTask = 2048;
// Keys whose cache lines are requested before the first of them is read.
constexpr std::int64_t kBlock = 32;
// Keys between a request for a cache line and its use.
constexpr std::int64_t kAhead = 16;

std::int64_t floats_per_row(std::int64_t dim, std::int64_t state_floats) {
  const std::int64_t used = dim + state_floats + 1;
  const std::int64_t unit = used * 4 < 256 ? 4 : 16;
  return (used + unit - 1) / unit * unit;
}

// Calls visit(j) for j in [0, size), or downwards, so that visits with the same owner[j] keep their
// order: each thread visits the owners that fall to it. Negative owners are skipped.
// prefetch(owner[j]) comes some visits earlier.
template <typename Prefetch, typename Visit>
void for_each_in_owner_order(const std::int64_t* owner, std::int64_t size, bool backwards,
                             const Prefetch& prefetch, const Visit& visit) {
  const std::int64_t parts =
      std::max<std::int64_t>(1, std::min<std::int64_t>(num_threads(), size / kKeysPerTask));
  const auto part_of = [parts](std::int64_t owner_number) {
    const std::uint32_t spread = static_cast<std::uint32_t>(owner_number) * 0x9E3779B1u;
    return static_cast<std::int64_t>((spread * static_cast<std::uint64_t>(parts)) >> 32);
  };
  parallel_tasks(parts, [&](std::int64_t part) {
    for (std::int64_t i = 0; i < size; ++i) {
      if (i + kAhead < size) {
        const std::int64_t later = owner[backwards ? size - 1 - i - kAhead : i + kAhead];
        if (later >= 0 && part_of(later) == part) prefetch(later);
      }
      const std::int64_t j = backwards ? size - 1 - i : i;
      if (owner[j] >= 0 && part_of(owner[j]) == part) visit(j);
    }
  });
}

}  // namespace

struct EmbeddingStore::Missing {
  static constexpr std::uint32_t kNotEntered = kNoRow;

  KeySpan in;
  std::vector<std::int64_t> positions;   // [m] where in the call, ascending
  std::vector<std::uint32_t> by_shard;   // [m] indices into positions, grouped by shard, ascending
  std::vector<std::int64_t> shard_ends;  // [kNumShards + 1]
  std::vector<std::uint32_t> first;      // [m] the first of the missing with the same key
  std::vector<std::uint32_t> rows;       // [m] of first ones: row number, kNoRow if refused

  std::int64_t key(std::uint32_t i) const { return in.keys[positions[i]]; }
  std::int32_t table(std::uint32_t i) const { return in.tables[positions[i]]; }

  // Calls visit(i) for all missing keys, those of one shard in order on one thread, and prefetch(i)
  // some visits earlier.
  template <typename Prefetch, typename Visit>
  void for_each_by_shard(const Prefetch& prefetch, const Visit& visit) const {
    const auto count = static_cast<std::int64_t>(positions.size());
    const std::int64_t shards_per_task = kNumShards * kKeysPerTask / count + 1;
    parallel_ranges(kNumShards, shards_per_task, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t at = shard_ends[begin]; at < shard_ends[end]; ++at) {
        if (at + kAhead < shard_ends[end]) prefetch(by_shard[at + kAhead]);
        visit(by_shard[at]);
      }
    });
  }
};

EmbeddingStore::EmbeddingStore(const StoreConfig& config)
    : dim_(config.dim),
      state_floats_(config.state_floats),
      state_init_(config.state_init),
      row_floats_(floats_per_row(config.dim, config.state_floats)),
      memory_(config.limit_bytes),
      slabs_(static_cast<std::size_t>(row_floats_) * sizeof(float), &memory_),
      records_(sizeof(Record), &memory_) {
  if (dim_ < 1 || state_floats_ < 0) {
    throw std::invalid_argument("store: dim must be >= 1 and state_floats >= 0");
  }
  for (const TableConfig& table : config.tables) {
    tables_.push_back(std::make_unique<Table>(table, &memory_));
  }
}

void EmbeddingStore::check_tables(const KeySpan& in) const {
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

void EmbeddingStore::search(const KeySpan& in, std::int64_t* handles) const {
  parallel_ranges(in.size, kKeysPerTask, [&](std::int64_t begin, std::int64_t end) {
    std::uint64_t hashes[kBlock];
    for (std::int64_t block = begin; block < end; block += kBlock) {
      const std::int64_t count = std::min(kBlock, end - block);
      for (std::int64_t i = 0; i < count; ++i) {
        const KeyIndex& index = tables_[in.tables[block + i]]->index;
        hashes[i] = index.hash(in.keys[block + i]);
        index.prefetch(hashes[i]);
      }
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t j = block + i;
        const std::uint32_t found = tables_[in.tables[j]]->index.find(hashes[i], in.keys[j]);
        handles[j] = found == kNoRow ? -1 : std::int64_t{found};
      }
    }
  });
}

void EmbeddingStore::find(const KeySpan& in, std::int64_t* handles) const {
  check_tables(in);
  const std::shared_lock<std::shared_mutex> lock(keys_mutex_);
  search(in, handles);
}

void EmbeddingStore::retrieve(const KeySpan& in, const std::int64_t* counts, std::int64_t batch,
                              const RetrievalSpan& out) {
  check_tables(in);
  const std::unique_lock<std::shared_mutex> lock(keys_mutex_);
  search(in, out.handles);
  insert_missing(in, out);
  const auto request_record = [this](std::int64_t handle) {
    __builtin_prefetch(record(handle), 1);
  };
  for (std::int64_t j = 0; j < in.size; ++j) {
    if (out.handles[j] >= 0) continue;
    out.previous_last_used[j] = -1;
    out.previous_frequency[j] = 0;
  }
  for_each_in_owner_order(out.handles, in.size, false, request_record, [&](std::int64_t j) {
    Record* const used = record(out.handles[j]);
    out.previous_last_used[j] = used->last_used;
    out.previous_frequency[j] = used->frequency;
    if (batch >= 0) used->last_used = batch;
    used->frequency += counts == nullptr ? 1 : counts[j];
  });
}

void EmbeddingStore::insert_missing(const KeySpan& in, const RetrievalSpan& out) {
  Missing missing{in, {}, {}, {}, {}, {}};
  for (std::int64_t j = 0; j < in.size; ++j) {
    out.status[j] = static_cast<std::uint8_t>(KeyStatus::kFound);
    if (out.handles[j] < 0) missing.positions.push_back(j);
  }
  if (missing.positions.empty()) return;
  if (missing.positions.size() >= kNoRow) throw std::length_error("store: too many keys in a call");
  const auto count = static_cast<std::int64_t>(missing.positions.size());
  try {
    enter_provisionally(&missing);
    number_rows(&missing);
  } catch (...) {
    withdraw(missing);
    throw;
  }
  settle(missing);
  parallel_ranges(count, kKeysPerTask / 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::uint32_t first = missing.first[i];
      const std::uint32_t number = missing.rows[first];
      const bool is_first = first == static_cast<std::uint32_t>(i);
      const std::int64_t j = missing.positions[i];
      out.handles[j] = number == kNoRow ? -1 : std::int64_t{number};
      const KeyStatus status = number == kNoRow ? KeyStatus::kRefused
                               : is_first       ? KeyStatus::kInserted
                                                : KeyStatus::kFound;
      out.status[j] = static_cast<std::uint8_t>(status);
      if (status != KeyStatus::kInserted) continue;
      initial_row(in.tables[j], in.keys[j], row(number));
      *record(number) = Record{in.keys[j], -1, 0, in.tables[j], 0};
    }
  });
}

void EmbeddingStore::enter_provisionally(Missing* missing) {
  const auto count = static_cast<std::uint32_t>(missing->positions.size());
  const auto hash_of = [&](std::uint32_t i) {
    return tables_[missing->table(i)]->index.hash(missing->key(i));
  };
  missing->first.assign(count, Missing::kNotEntered);
  missing->rows.assign(count, kNoRow);
  missing->by_shard.resize(count);
  missing->shard_ends.assign(kNumShards + 1, 0);
  for (std::uint32_t i = 0; i < count; ++i) ++missing->shard_ends[shard_of(hash_of(i)) + 1];
  for (int s = 0; s < kNumShards; ++s) missing->shard_ends[s + 1] += missing->shard_ends[s];
  std::vector<std::int64_t> next(missing->shard_ends.begin(), missing->shard_ends.end() - 1);
  for (std::uint32_t i = 0; i < count; ++i) missing->by_shard[next[shard_of(hash_of(i))]++] = i;
  const auto request_bucket = [&](std::uint32_t i) {
    tables_[missing->table(i)]->index.prefetch(hash_of(i));
  };
  missing->for_each_by_shard(request_bucket, [&](std::uint32_t i) {
    const std::uint32_t found =
        tables_[missing->table(i)]->index.insert(hash_of(i), missing->key(i), i);
    missing->first[i] = found == kNoRow ? i : found;
  });
}

void EmbeddingStore::number_rows(Missing* missing) {
  std::vector<std::int64_t> sizes;
  for (const auto& table : tables_) sizes.push_back(table->size);
  std::int64_t num_rows = num_rows_.load(std::memory_order_relaxed);
  std::uint32_t first_free = first_free_;
  for (std::uint32_t i = 0; i < missing->rows.size(); ++i) {
    if (missing->first[i] != i) continue;
    std::int64_t& size = sizes[missing->table(i)];
    const std::int64_t quota = tables_[missing->table(i)]->config.quota;
    const bool table_full = quota >= 0 && size >= quota;
    if (table_full || (first_free == kNoRow && num_rows >= std::int64_t{kNoRow})) continue;
    ++size;
    if (first_free != kNoRow) {
      missing->rows[i] = first_free;
      first_free = static_cast<std::uint32_t>(record(first_free)->key);
    } else {
      missing->rows[i] = static_cast<std::uint32_t>(num_rows++);
    }
  }
  slabs_.reserve(static_cast<std::uint64_t>(num_rows));
  records_.reserve(static_cast<std::uint64_t>(num_rows));
  // Nothing can fail from here on.
  num_rows_.store(num_rows, std::memory_order_relaxed);
  first_free_ = first_free;
  for (std::size_t t = 0; t < tables_.size(); ++t) tables_[t]->size = sizes[t];
}

void EmbeddingStore::settle(const Missing& missing) {
  const auto request_bucket = [&](std::uint32_t i) {
    const KeyIndex& index = tables_[missing.table(i)]->index;
    index.prefetch(index.hash(missing.key(i)));
  };
  missing.for_each_by_shard(request_bucket, [&](std::uint32_t i) {
    if (missing.first[i] != i) return;
    KeyIndex& index = tables_[missing.table(i)]->index;
    const std::uint64_t hash = index.hash(missing.key(i));
    if (missing.rows[i] == kNoRow) {
      index.erase(hash, missing.key(i));
    } else {
      index.assign(hash, missing.key(i), missing.rows[i]);
    }
  });
}

void EmbeddingStore::withdraw(const Missing& missing) {
  for (std::uint32_t i = 0; i < missing.first.size(); ++i) {
    if (missing.first[i] != i) continue;
    KeyIndex& index = tables_[missing.table(i)]->index;
    index.erase(index.hash(missing.key(i)), missing.key(i));
  }
}

void EmbeddingStore::undo(const RetrievalSpan& retrieval, std::int64_t size) {
  check_handles(retrieval.handles, size);
  const std::unique_lock<std::shared_mutex> lock(keys_mutex_);
  const auto request_record = [this](std::int64_t handle) {
    __builtin_prefetch(record(handle), 1);
  };
  for_each_in_owner_order(retrieval.handles, size, true, request_record, [&](std::int64_t j) {
    Record* const used = record(retrieval.handles[j]);
    used->last_used = retrieval.previous_last_used[j];
    used->frequency = retrieval.previous_frequency[j];
  });
  // Backwards, so that repeating the retrieval gives the keys the same rows.
  for (std::int64_t j = size - 1; j >= 0; --j) {
    if (retrieval.status[j] != static_cast<std::uint8_t>(KeyStatus::kInserted)) continue;
    const Record* const inserted = record(retrieval.handles[j]);
    if (inserted->table == kFreeRecord) continue;
    Table* const table = tables_[inserted->table].get();
    const std::int64_t key = inserted->key;
    free_row(table, table->index.erase(table->index.hash(key), key));
  }
}

void EmbeddingStore::erase(const KeySpan& in, std::uint8_t* status) {
  check_tables(in);
  const std::unique_lock<std::shared_mutex> lock(keys_mutex_);
  for (std::int64_t j = 0; j < in.size; ++j) {
    Table* const table = tables_[in.tables[j]].get();
    const std::uint32_t number = table->index.erase(table->index.hash(in.keys[j]), in.keys[j]);
    status[j] =
        static_cast<std::uint8_t>(number == kNoRow ? KeyStatus::kAbsent : KeyStatus::kFound);
    if (number != kNoRow) free_row(table, number);
  }
}

void EmbeddingStore::clear() {
  const std::unique_lock<std::shared_mutex> lock(keys_mutex_);
  for (const auto& table : tables_) {
    table->index = KeyIndex(table->config.hash, &memory_);
    table->size = 0;
  }
  num_rows_.store(0, std::memory_order_relaxed);
  first_free_ = kNoRow;
}

void EmbeddingStore::free_row(Table* table, std::uint32_t row_number) {
  --table->size;
  Record* const freed = record(row_number);
  freed->key = first_free_;
  freed->table = kFreeRecord;
  first_free_ = row_number;
}

std::int64_t EmbeddingStore::size(std::int64_t table) const {
  const std::shared_lock<std::shared_mutex> lock(keys_mutex_);
  return tables_.at(static_cast<std::size_t>(table))->size;
}

StoreMemory EmbeddingStore::memory() const {
  const std::shared_lock<std::shared_mutex> lock(keys_mutex_);
  const std::uint64_t index_bytes = memory_.used_bytes() - slabs_.bytes() - records_.bytes();
  return {index_bytes, slabs_.bytes(), records_.bytes()};
}

}  // namespace nestpipe
