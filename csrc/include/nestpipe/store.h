// The rows of a group of tables with the same dim, data type and optimizer state.
//
// A row is float32 [row_floats]: embedding [embedding_words] (dim elements of the storage type,
// row_storage.h), optimizer state [state_floats], int32 `updates` (bit-cast), padding to a stride
// of whole cache lines (of 16 bytes below 256). Rows of all tables lie in common slabs that never
// move; a row's number is its handle, valid until the key is erased or evicted. Numbers of free
// rows are used again, the lowest first. Each row has a record: key, table, last_used, frequency.
// In memory it follows `updates`, where callers see padding, so that using a row touches lines of
// one place; a call that copies whole rows gives zeros there.
//
// Evicted rows go to limbo: out of the index, number and contents untouched and not used again, so
// that undoing the retrieval puts them back without a copy. Limbo of batch u is freed on entry to a
// retrieval of batch u + 2 or later (batch u cannot be undone then), and by erasing.
//
// Results never depend on the number of threads: new rows are numbered in input order, metadata of
// a row is updated in input order, and values are functions of the key. All calls accept repeated
// keys, except that rows written twice in one call must be equal.
//
// Rows may lie in a file of which only a part is in memory (row_file.h); index and records never
// do: records are an array of their own then.
//
// Concurrency. Calls that change which keys exist or their metadata exclude each other and wait for
// searches; those that only read or write rows by handle take no lock and may run beside everything
// else, as long as their handles stay valid and no two touch the same row (update_pooled of rows
// whose use it counts is one of the others). A call that throws has changed no key, row, count or
// metadata.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nestpipe/admission.h"
#include "nestpipe/eviction.h"
#include "nestpipe/free_rows.h"
#include "nestpipe/init.h"
#include "nestpipe/key_index.h"
#include "nestpipe/lookup_pool.h"
#include "nestpipe/memory.h"
#include "nestpipe/parallel.h"
#include "nestpipe/row_file.h"
#include "nestpipe/row_storage.h"
#include "nestpipe/row_update.h"
#include "nestpipe/scratch.h"
#include "nestpipe/slabs.h"

namespace nestpipe {

// Values of nestpipe_kernels.types.KeyStatus.
enum class KeyStatus : std::uint8_t {
  kFound = 0,
  kInserted = 1,
  kAbsent = 2,
  kRefused = 3,
  kNotAdmitted = 4
};

struct TableConfig {
  std::uint64_t hash = 0;  // hash_name(name)
  std::uint64_t seed = 0;
  Initializer init;
  std::int64_t quota = -1;  // Rows at most; -1: no limit.
  Initializer absent;       // What keys without a row read, if has_absent; else their initial row.
  bool has_absent = false;
  AdmissionRule admission;
  EvictionRule eviction;
};

struct StoreConfig {
  std::int64_t dim = 0;
  DataType data_type = DataType::kFloat32;
  std::int64_t state_floats = 0;
  float state_init = 0.0f;
  std::uint64_t limit_bytes = ~std::uint64_t{0};
  std::vector<TableConfig> tables;
  std::string file_directory = {};     // Of a file for the rows; empty: they lie in memory.
  std::uint64_t file_limit_bytes = 0;  // How much of the file stays in memory.
};

struct KeySpan {
  const std::int64_t* keys;    // [n]
  const std::int32_t* tables;  // [n], each in [0, number of tables)
  std::int64_t size;
};

// What retrieve answers. All [n].
struct RetrievalSpan {
  std::int64_t* handles;        // -1: refused or not admitted. May be null for retrieve()
  std::uint8_t* status;         // KeyStatus
  float* embeddings = nullptr;  // If not null, also [n, dim], as read_embeddings() of the handles.
};

// The rows of a list of occurrences: each row once, in an order that means nothing.
struct OccurrenceSpan {
  std::int32_t* slots;    // [n] which of the rows each occurrence has; -1: padding
  std::int64_t* handles;  // [n], of which the first ones are written
  std::int64_t* keys;     // the same
  std::int32_t* tables;   // the same
};

// What happened to keys of a table since it was made, per key and call; undo takes back.
struct TableCounters {
  std::int64_t inserted = 0;
  std::int64_t evicted = 0;
  std::int64_t expired = 0;
  std::int64_t refused = 0;
  std::int64_t not_admitted = 0;
};

// Rows that a call used, each once, and how often: noted now, counted in their records later.
struct NotedUse {
  static constexpr std::int64_t kCounted = -1;

  NotedUse(std::int64_t num_rows, std::int64_t batch_index)
      : size(num_rows),
        batch(batch_index),
        handles(num_rows),
        counts(num_rows),
        last_used(num_rows),
        frequency(num_rows) {}

  std::int64_t size;
  std::int64_t batch;
  Scratch<std::int64_t> handles;    // [size]
  Scratch<std::int64_t> counts;     // [size] occurrences; kCounted: done
  Scratch<std::int64_t> last_used;  // [size] before the call, of those that are counted
  Scratch<std::int64_t> frequency;  // the same
};

// What undo needs beside handles and status; its size is that of the call.
struct RetrievalJournal {
  std::int64_t sequence = -1;  // Of the retrieval; -1 once undone.
  std::int64_t newest_before = -1;
  std::int64_t last_batch_before = -1;
  Scratch<std::int64_t> last_used;  // [n] before the call; -1 and 0 for new rows
  Scratch<std::int64_t> frequency;
  std::shared_ptr<NotedUse> use;  // Of retrieve_occurrences, which has this instead of the two.
  std::vector<CountChange> counts;
  std::vector<TableCounters> counters;
  std::int64_t num_evicted = 0;
};

// The keys that a retrieval took out, with their tables.
struct EvictedKeys {
  std::vector<std::int64_t> keys;
  std::vector<std::int32_t> tables;
};

struct MetadataSpan {
  std::int64_t* last_used;  // [n], batch index, -1: never
  std::int64_t* frequency;  // [n], occurrences
};

// Bytes offset .. offset + bytes - 1 of each row; padding reads as zeros and is not written.
struct RowColumn {
  std::int64_t offset;
  std::int64_t bytes;
  char* data;  // [n, bytes]
};

struct StoreMemory {
  std::uint64_t index_bytes;
  std::uint64_t slab_bytes;
  std::uint64_t metadata_bytes;  // Records, wherever they lie, and what else is there for each row.
  std::uint64_t admission_bytes;
  std::uint64_t file_bytes;       // On the disk.
  std::uint64_t num_keys;         // Of all tables.
  std::uint64_t untouched_bytes;  // Of slabs and metadata: behind all rows there ever were.
  std::uint64_t row_bytes;        // Of one row, without its record.
};

// Floats of a row, padding included.
std::int64_t floats_per_row(std::int64_t embedding_words, std::int64_t state_floats);

class EmbeddingStore {
 public:
  explicit EmbeddingStore(const StoreConfig& config);

  std::int64_t dim() const { return dim_; }
  std::int64_t embedding_words() const { return embedding_words_; }
  std::int64_t row_floats() const { return row_floats_; }
  std::int64_t num_tables() const { return static_cast<std::int64_t>(tables_.size()); }

  // Finds or inserts. Of the keys without a row, admission decides which may have one, occurrences
  // of the call included; eviction makes room for them; where there is none, the last ones in input
  // order are refused. frequency += counts [n] (1 each where counts is null, else >= 0); a new
  // row's starts with the key's count so far. last_used = batch. With batch -1 last_used stays as
  // it is and nothing is evicted. `score` serves tables with EvictionKind::kScore. journal null: it
  // will not be undone; then row numbers that do not suffice are std::bad_alloc.
  void retrieve(const KeySpan& in, const std::int64_t* counts, std::int64_t batch,
                const ScoreFunction& score, const RetrievalSpan& out, RetrievalJournal* journal);
  // The retrieval of keys with repetitions, where all of them have rows and no table evicts: counts
  // each occurrence, finds each row once. valid [n], 0 for padding, or null. Returns the number of
  // rows; -1 where that is not so, and nothing has changed.
  std::int64_t retrieve_occurrences(const KeySpan& in, const std::uint8_t* valid,
                                    std::int64_t batch, const OccurrenceSpan& out,
                                    RetrievalJournal* journal);
  // Takes back a retrieval, newest first: inserted keys go, evicted ones return to their rows;
  // metadata, counts and counters are as before. Throws std::invalid_argument where it is not the
  // newest, or its evicted rows are free.
  void undo(const RetrievalSpan& retrieval, std::int64_t size, RetrievalJournal* journal);
  // Throws std::invalid_argument where the rows are free.
  EvictedKeys evicted(const RetrievalJournal& journal) const;
  // Inserts distinct keys with rows [n, row_floats] and metadata as given, no rules asked; those of
  // keys that are there are replaced. The position of the first key that its table's quota has no
  // room for, or -1; if not -1, nothing has changed.
  std::int64_t load_rows(const KeySpan& in, const float* rows, const MetadataSpan& metadata);
  // The same for keys of one table, with rows by columns; what no column holds is zero.
  std::int64_t load_columns(std::int64_t table, const std::int64_t* keys, std::int64_t size,
                            const std::vector<RowColumn>& columns, const MetadataSpan& metadata);
  // Makes a table's index as long as about so many keys need, so that it does not grow on the way.
  // Throws std::bad_alloc; answers stay the same.
  void reserve_keys(std::int64_t table, std::int64_t num_keys);
  // handles [n], -1 where absent.
  void find(const KeySpan& in, std::int64_t* handles) const;
  // Keys whose rows are about to be read: those that have one and lie in a file, and not in memory,
  // are asked for, without waiting. Changes nothing; may run beside everything else.
  void warm(const KeySpan& in) const;
  // All 0 where rows lie in memory.
  RowFileCounters file_counters() const;
  // status [n]: kFound (now erased) or kAbsent.
  void erase(const KeySpan& in, std::uint8_t* status);

  // Removes all keys, counts and counters; memory of rows is kept for later ones.
  void clear();
  // The same for one table.
  void clear_table(std::int64_t table);

  // Row index[j] (j where index is null) of out [num_out, row_floats] = the row of handles[j], or
  // the key's initial row where that is -1. The index has no repetitions.
  void gather(const std::int64_t* handles, const KeySpan& in, const std::int64_t* index, float* out,
              std::int64_t num_out) const;
  // Embedding, state and updates of rows [n, row_floats]; handles of -1 are skipped.
  void write_back(const std::int64_t* handles, std::int64_t size, const float* rows);
  // out [n, dim], widened; initial values, rounded to the storage type, where handles[j] is -1.
  void read_embeddings(const std::int64_t* handles, const KeySpan& in, float* out) const;
  // Embeddings alone, [n, dim], rounded to nearest; handles of -1 are skipped.
  void write_embeddings(const std::int64_t* handles, std::int64_t size, const float* values);

  // Whether rows may be pooled and updated where they lie: float32, in memory.
  bool pools_in_place() const { return file_ == nullptr && data_type_ == DataType::kFloat32; }
  // lookup_pool_forward of the rows of handles [n], slots in [-1, n); where a handle is -1, the
  // key's initial embedding. Only where pools_in_place().
  void pool(const std::int64_t* handles, const KeySpan& in, const BagList& bags,
            const std::vector<SegmentOutput>& outs) const;
  // The same of the keys themselves [n], one for each occurrence of bags without slots; valid [n],
  // 0 for padding, or null. False where some key has no row; outs may be written in part then.
  bool pool_keys(const KeySpan& in, const std::uint8_t* valid, const BagList& bags,
                 const std::vector<SegmentOutput>& outs) const;
  // The update of the rows of handles [n], distinct, by the gradients that bags give them; handles
  // of -1 are skipped. Of the arguments, lr, row_lr [n] and mask [n] count. No kMax. Only where
  // pools_in_place().
  void update_pooled(const std::int64_t* handles, std::int64_t size, const BagList& bags,
                     const std::vector<SegmentGradient>& grads, const UpdateArguments& arguments,
                     const UpdateSettings& settings);
  // Changes whenever keys may get or lose rows, but by erase and clear.
  std::int64_t sequence() const;

  // -1 and 0 for handles of -1.
  void read_metadata(const std::int64_t* handles, std::int64_t size, const MetadataSpan& out) const;
  void write_metadata(const std::int64_t* handles, std::int64_t size, const MetadataSpan& in);

  std::int64_t size(std::int64_t table) const;
  // The largest batch index of retrievals and of loaded or written metadata; -1: none.
  std::int64_t last_batch() const;
  TableCounters counters(std::int64_t table) const;
  void set_counters(std::int64_t table, const TableCounters& counters);
  // Blocks of a table's counting filter over all slices, and cells of each; 0 where it has none.
  std::int64_t filter_blocks(std::int64_t table) const;
  std::int64_t filter_cells_per_block(std::int64_t table) const;
  // Counts of keys without a row, of index shards first .. end - 1 by (shard, key); of a filter,
  // the same part of all its blocks.
  CountsState admission_state(std::int64_t table, int first, int end) const;
  // Adds to the counts: exact ones replace those of the same key, cells of filters keep the larger.
  void load_admission_state(std::int64_t table, const CountsState& state);
  // Keys and handles of a table by ascending handle.
  void export_table(std::int64_t table, std::vector<std::int64_t>* keys,
                    std::vector<std::int64_t>* handles) const;
  // Keys per index shard of a table, [kNumShards].
  void shard_sizes(std::int64_t table, std::int64_t* sizes) const;
  // Keys and handles of index shards first .. end - 1, by (shard, key): an order that depends on
  // the keys alone. Returns how many; throws std::length_error if there are more than `capacity`.
  std::int64_t export_shards(std::int64_t table, int first, int end, std::int64_t capacity,
                             std::int64_t* keys, std::int64_t* handles) const;
  // Parts of the rows of handles [n], none of them -1, each part into an array of its own.
  void copy_columns(const std::int64_t* handles, std::int64_t size,
                    const std::vector<RowColumn>& columns) const;
  StoreMemory memory() const;

 private:
  // 32 bytes beside each row.
  struct Record {
    std::int64_t key;
    std::int64_t last_used;
    std::int64_t frequency;
    std::int32_t table;
  };
  // 4 bytes more, apart from the record, so that looking for rows to evict passes over little
  // memory: kNoAge where no key has the row, else age_of(last_used) in stores that evict.
  using Age = std::uint32_t;
  static constexpr Age kNoAge = 0xFFFFFFFFu;
  // Never descends, so that no row is overlooked.
  static Age age_of(std::int64_t last_used) {
    const std::int64_t largest = std::int64_t{kNoAge} - 1;
    return static_cast<Age>(last_used >= largest ? largest : last_used < 0 ? 0 : last_used + 1);
  }

  struct Table {
    Table(const TableConfig& settings, MemoryAccount* account)
        : config(settings),
          index(settings.hash, account),
          counts(settings.admission, settings.hash, account) {}
    TableConfig config;
    KeyIndex index;
    AdmissionCounts counts;
    std::int64_t size = 0;
    TableCounters counters;
  };

  struct Limbo {
    std::int64_t batch;
    std::int64_t sequence;
    std::vector<std::uint32_t> rows;
  };

  // Rows' embeddings on their way into rows of `out`, widened; past the caches where that pays.
  struct EmbeddingWriter {
    DataType data_type;
    std::int64_t dim;
    float* out;
    bool stream;
    void to(const float* words, std::int64_t j) const;
    void finish() const;  // Before another thread reads what this one wrote.
  };
  EmbeddingWriter writer(float* out, std::int64_t num_rows) const;
  // Of all keys but those whose status is kInserted; null: of all.
  void copy_embeddings(const std::int64_t* handles, const KeySpan& in, const std::uint8_t* status,
                       float* out) const;

  struct Missing;    // The keys of a call that have no row yet, and what becomes of them.
  struct Departure;  // The rows that a call takes out.

  float* row(std::int64_t handle) const { return static_cast<float*>(slabs_.at(handle)); }
  // Of a row that lies in memory.
  Record* record_of(float* row) const { return reinterpret_cast<Record*>(row + record_floats_); }
  Record* record(std::int64_t handle) const {
    if (file_ == nullptr) return record_of(row(handle));
    return static_cast<Record*>(records_.at(handle));
  }
  Age* age(std::int64_t handle) const { return static_cast<Age*>(ages_.at(handle)); }
  void set_last_used(std::int64_t handle, std::int64_t batch) {
    record(handle)->last_used = batch;
    if (evicts_) *age(handle) = age_of(batch);
  }
  // Locks of keys_mutex_; a score function of this thread's retrieval must not wait for itself.
  // With all but the first, what is noted of rows' use has been counted.
  std::shared_lock<std::shared_mutex> shared_keys() const;
  std::shared_lock<std::shared_mutex> shared_records() const;
  std::unique_lock<std::shared_mutex> own_keys() const;
  // Rows handle(0), ... handle(size - 1) (-1: none) are about to be used: see RowFile::use.
  template <typename HandleOf>
  void use_rows(std::int64_t begin, std::int64_t end, bool writes, const HandleOf& handle) const {
    file_->use(end - begin, writes, [&](std::int64_t i) {
      const std::int64_t number = handle(begin + i);
      if (number < 0) return RowFile::Range{-1, 0, 0};
      return slabs_.range(static_cast<std::uint64_t>(number));
    });
  }
  // body(begin, end) for ranges of rows_per_task or more of rows handle(0), ... handle(size - 1),
  // on several threads; where rows lie in a file, portion by portion that fits into its memory,
  // after use_rows.
  template <typename HandleOf, typename Body>
  void for_row_ranges(std::int64_t size, std::int64_t rows_per_task, bool writes,
                      const HandleOf& handle, const Body& body) const {
    if (file_ == nullptr) {
      parallel_ranges(size, rows_per_task, body);
      return;
    }
    const std::int64_t most = file_->portion(static_cast<std::size_t>(row_floats_) * sizeof(float));
    for (std::int64_t begin = 0; begin < size; begin += most) {
      const std::int64_t end = size - begin < most ? size : begin + most;
      use_rows(begin, end, writes, handle);
      parallel_ranges(end - begin, rows_per_task, [&](std::int64_t first, std::int64_t last) {
        body(begin + first, begin + last);
      });
    }
  }
  static void check_shards(int first, int end);
  // Throws in a forked child if rows lie in a file.
  void check_process() const {
    if (file_ != nullptr) file_->check_process();
  }
  void check_tables(const KeySpan& in) const;
  void check_handles(const std::int64_t* handles, std::int64_t size) const;
  void make_embedding(const Initializer& init, std::int32_t table, std::int64_t key,
                      float* words) const;
  // Embedding, state and updates.
  void initial_row(std::int32_t table, std::int64_t key, float* out) const;
  void absent_row(std::int32_t table, std::int64_t key, float* out) const;
  void absent_embedding(std::int32_t table, std::int64_t key, float* words) const;
  void search(const KeySpan& in, std::int64_t* handles) const;
  // note(j, row number or kNoRow) for j in [begin, end): for some j twice, the last one counts
  // (search_range.h).
  template <typename Note>
  void search_range(const KeySpan& in, std::int64_t begin, std::int64_t end,
                    const Note& note) const;

  // Steps of retrieve (retrieval.cpp, found_rows.cpp, entering.cpp, new_rows.cpp).
  void start_journal(std::int64_t size, RetrievalJournal* journal) const;
  bool all_get_rows() const;
  void use_found(const RetrievalSpan& out, std::int64_t size, const std::int64_t* counts,
                 std::int64_t batch, const RetrievalJournal* journal);
  void restore_metadata(const RetrievalSpan& out, std::int64_t size,
                        const RetrievalJournal& journal);
  void collect_missing(const std::int64_t* handles, Missing* missing);
  void enter(Missing* missing);
  void expect_rows(Missing* missing) const;
  std::uint32_t number_of_entered(const Missing& missing, std::uint32_t found) const;
  bool numbered_on_entry(Missing* missing);
  void check_numbers(const Missing& missing) const;
  void admit(Missing* missing);
  void number_rows(Missing* missing, const Departure& departure);
  void count_absent(const Missing& missing, RetrievalJournal* journal);
  void restore_counts(const std::vector<CountChange>& changes);
  void settle(const Missing& missing);
  void withdraw(const Missing& missing);
  void write_new_rows(const Missing& missing, std::int64_t batch, const RetrievalSpan& out);
  void copy_others(const Missing& missing, const RetrievalSpan& out) const;
  void take_numbers(const Missing& missing);
  void reserve_rows(std::uint64_t num_rows);

  // Of retrieve_occurrences (occurrences.cpp). All want the lock, to change what it guards.
  void count_use(NotedUse* use, std::int64_t begin, std::int64_t end) const;
  void count_noted() const;
  void forget_noted() const;
  // The lock if the use of just these rows is noted and not counted, else none.
  std::unique_lock<std::shared_mutex> own_if_noted(const std::int64_t* handles,
                                                   std::int64_t size) const;

  // Steps of load_columns (loading.cpp).
  void check_columns(const std::vector<RowColumn>& columns) const;
  std::size_t stored_bytes(const RowColumn& column) const;
  std::vector<std::pair<std::int64_t, std::int64_t>> gaps_between(
      const std::vector<RowColumn>& columns) const;
  bool load_new(std::int64_t table_number, const std::int64_t* keys, std::int64_t size,
                const MetadataSpan& metadata,
                const std::function<void(std::int64_t, char*)>& assemble);

  // Steps of eviction (eviction.cpp).
  Departure plan_departure(const std::vector<std::int64_t>& num_new, std::int64_t batch,
                           const ScoreFunction& score) const;
  std::vector<EvictionCandidate> choose_victims(std::int32_t table, std::int64_t num_new,
                                                std::int64_t batch, const ScoreFunction& score,
                                                Departure* departure) const;
  std::vector<EvictionCandidate> candidates(std::int32_t table, std::int64_t unused_since,
                                            bool by_frequency, std::int64_t limit) const;
  void old_rows(std::int64_t begin, std::int64_t end, Age oldest,
                std::vector<std::uint32_t>* rows) const;
  std::int64_t estimate_limit(std::int32_t table, std::int64_t unused_since, bool by_frequency,
                              std::int64_t wanted) const;
  void score_candidates(std::int32_t table, std::int64_t batch, const ScoreFunction& score,
                        std::vector<EvictionCandidate>* rows) const;
  void depart(Departure* departure, std::int64_t batch, std::int64_t sequence);
  void bring_back(const Limbo& limbo);
  void free_limbo(std::int64_t last_batch);
  void free_row(Table* table, std::uint32_t row_number);

  const std::int64_t dim_;
  const DataType data_type_;
  const std::int64_t embedding_words_;
  const std::int64_t state_floats_;
  const float state_init_;
  const std::int64_t row_floats_;
  const std::int64_t used_floats_;    // Of row_floats_: embedding, state, updates.
  const std::int64_t record_floats_;  // Where a row's record begins, in memory.
  const std::int64_t stride_floats_;  // Between rows.

  bool evicts_ = false;  // Some table has an eviction rule.
  mutable std::shared_mutex keys_mutex_;
  MemoryAccount memory_;  // Before everything that allocates from it.
  std::vector<std::unique_ptr<Table>> tables_;
  std::unique_ptr<RowFile> file_;  // Of slabs_, or none.
  Slabs slabs_;
  Slabs records_;
  Slabs ages_;
  FreeRows free_rows_;                     // Room for all row numbers.
  std::atomic<std::int64_t> num_rows_{0};  // Row numbers ever given out, free ones included.
  std::vector<Limbo> limbo_;               // Oldest first.
  std::int64_t sequence_ = 0;              // Of the latest retrieval or loading.
  std::int64_t newest_ = -1;               // The retrieval that may be undone next.
  std::int64_t last_batch_ = -1;           // Largest batch index seen.
  mutable std::atomic<std::thread::id> scoring_thread_{};
  mutable std::shared_ptr<NotedUse> noted_;     // Not counted yet; of the newest retrieval.
  mutable std::atomic<bool> has_noted_{false};  // Whether noted_ is there, without the lock.
};

}  // namespace nestpipe
