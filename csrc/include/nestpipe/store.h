// The rows of a group of tables with the same dim, data type and optimizer state.
//
// A row is float32 [row_floats]: embedding [dim], optimizer state [state_floats], int32 `updates`
// (bit-cast), padding to a stride of whole cache lines (of 16 bytes below 256). Rows of all tables
// lie in common slabs that never move; a row's number is its handle, valid until the key is erased.
// Numbers of erased rows are used again, the last erased first. Beside each row, not in it, lies a
// record: key, table, last_used, frequency.
//
// Results never depend on the number of threads: new rows are numbered in input order, metadata of
// a row is updated in input order, and values are functions of the key. All calls accept repeated
// keys, except that rows written twice in one call must be equal.
//
// Concurrency. Calls that change which keys exist or their metadata exclude each other and wait for
// searches; those that only read or write rows by handle take no lock and may run beside everything
// else, as long as their handles stay valid and no two touch the same row. A call that throws
// std::bad_alloc has changed no key, row or metadata.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "nestpipe/init.h"
#include "nestpipe/key_index.h"
#include "nestpipe/memory.h"
#include "nestpipe/slabs.h"

namespace nestpipe {

// Values of nestpipe_kernels.types.KeyStatus.
enum class KeyStatus : std::uint8_t { kFound = 0, kInserted = 1, kAbsent = 2, kRefused = 3 };

struct TableConfig {
  std::uint64_t hash = 0;  // hash_name(name)
  std::uint64_t seed = 0;
  Initializer init;
  std::int64_t quota = -1;  // Rows at most; -1: no limit.
};

struct StoreConfig {
  std::int64_t dim = 0;
  std::int64_t state_floats = 0;
  float state_init = 0.0f;
  std::uint64_t limit_bytes = ~std::uint64_t{0};
  std::vector<TableConfig> tables;
};

struct KeySpan {
  const std::int64_t* keys;    // [n]
  const std::int32_t* tables;  // [n], each in [0, number of tables)
  std::int64_t size;
};

// What retrieve answers, and what undo needs. All [n].
struct RetrievalSpan {
  std::int64_t* handles;             // -1: refused
  std::uint8_t* status;              // KeyStatus
  std::int64_t* previous_last_used;  // Before the call; -1 for new rows.
  std::int64_t* previous_frequency;  // Before the call; 0 for new rows.
};

struct MetadataSpan {
  std::int64_t* last_used;  // [n], batch index, -1: never
  std::int64_t* frequency;  // [n], occurrences
};

struct StoreMemory {
  std::uint64_t index_bytes;
  std::uint64_t slab_bytes;
  std::uint64_t metadata_bytes;
};

class EmbeddingStore {
 public:
  explicit EmbeddingStore(const StoreConfig& config);

  std::int64_t dim() const { return dim_; }
  std::int64_t row_floats() const { return row_floats_; }
  std::int64_t num_tables() const { return static_cast<std::int64_t>(tables_.size()); }

  // Finds or inserts. A table at its quota refuses further new keys in input order. frequency +=
  // counts [n] (1 where counts is null); last_used = batch unless batch is -1.
  void retrieve(const KeySpan& in, const std::int64_t* counts, std::int64_t batch,
                const RetrievalSpan& out);
  // Takes back a retrieval, newest first: inserted keys go, metadata of found ones returns.
  void undo(const RetrievalSpan& retrieval, std::int64_t size);
  // handles [n], -1 where absent.
  void find(const KeySpan& in, std::int64_t* handles) const;
  // status [n]: kFound (now erased) or kAbsent.
  void erase(const KeySpan& in, std::uint8_t* status);

  // Removes all keys; their memory is kept for later rows.
  void clear();

  // Row index[j] (j where index is null) of out [num_out, row_floats] = the row of handles[j], or
  // the key's initial row where that is -1. The index has no repetitions.
  void gather(const std::int64_t* handles, const KeySpan& in, const std::int64_t* index, float* out,
              std::int64_t num_out) const;
  // Embedding, state and updates of rows [n, row_floats]; handles of -1 are skipped.
  void write_back(const std::int64_t* handles, std::int64_t size, const float* rows);
  // out [n, dim]; initial values where handles[j] is -1.
  void read_embeddings(const std::int64_t* handles, const KeySpan& in, float* out) const;
  // Embeddings alone, [n, dim]; handles of -1 are skipped.
  void write_embeddings(const std::int64_t* handles, std::int64_t size, const float* values);

  // -1 and 0 for handles of -1.
  void read_metadata(const std::int64_t* handles, std::int64_t size, const MetadataSpan& out) const;
  void write_metadata(const std::int64_t* handles, std::int64_t size, const MetadataSpan& in);

  std::int64_t size(std::int64_t table) const;
  // Keys and handles of a table by ascending handle.
  void export_table(std::int64_t table, std::vector<std::int64_t>* keys,
                    std::vector<std::int64_t>* handles) const;
  // Keys per index shard of a table, [kNumShards].
  void shard_sizes(std::int64_t table, std::int64_t* sizes) const;
  // Keys and handles of index shards first .. end - 1, by (shard, key): an order that depends on
  // the keys alone. Returns how many; throws std::length_error if there are more than `capacity`.
  std::int64_t export_shards(std::int64_t table, int first, int end, std::int64_t capacity,
                             std::int64_t* keys, std::int64_t* handles) const;
  StoreMemory memory() const;

 private:
  static constexpr std::int32_t kFreeRecord = -1;

  // 32 bytes beside each row. A free record's key is the next free row's number, kNoRow at the end.
  struct Record {
    std::int64_t key;
    std::int64_t last_used;
    std::int64_t frequency;
    std::int32_t table;
    std::int32_t unused;
  };

  struct Table {
    Table(const TableConfig& settings, MemoryAccount* account)
        : config(settings), index(settings.hash, account) {}
    TableConfig config;
    KeyIndex index;
    std::int64_t size = 0;
  };

  struct Missing;  // The keys of a call that have no row yet.

  float* row(std::int64_t handle) const { return static_cast<float*>(slabs_.at(handle)); }
  Record* record(std::int64_t handle) const { return static_cast<Record*>(records_.at(handle)); }
  void check_tables(const KeySpan& in) const;
  void check_handles(const std::int64_t* handles, std::int64_t size) const;
  void initial_row(std::int32_t table, std::int64_t key, float* out) const;
  void search(const KeySpan& in, std::int64_t* handles) const;
  void insert_missing(const KeySpan& in, const RetrievalSpan& out);
  void enter_provisionally(Missing* missing);
  void number_rows(Missing* missing);
  void settle(const Missing& missing);
  void withdraw(const Missing& missing);
  void free_row(Table* table, std::uint32_t row_number);

  const std::int64_t dim_;
  const std::int64_t state_floats_;
  const float state_init_;
  const std::int64_t row_floats_;

  mutable std::shared_mutex keys_mutex_;
  MemoryAccount memory_;  // Before everything that allocates from it.
  std::vector<std::unique_ptr<Table>> tables_;
  Slabs slabs_;
  Slabs records_;
  std::atomic<std::int64_t> num_rows_{0};  // Row numbers ever given out, free ones included.
  std::uint32_t first_free_ = kNoRow;
};

}  // namespace nestpipe
