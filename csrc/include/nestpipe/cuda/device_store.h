// A row store whose index and rows lie in device memory. All calls are bulk calls on the caller's
// stream; none synchronizes. Python owns the memory (store/device_store.py), makes it larger
// between calls, and reads sizes.
//
// Layout. The index is an array of buckets. A bucket is 16 bytes of `tags`: 15 tags, 0 for an empty
// slot, else 8 bits of the pair's hash, and a count of the pairs that belong here or before and
// went on because the bucket was full; and 15 entries (key, row, table) of 16 bytes. That a slot is
// used is said by its tag, so every int64 is a key. A pair lies in its home bucket or in the first
// one after it with room; a search ends where the count is 0. Erasing clears the tag and takes 1
// off the counts on the way: no tombstones, and what was there leaves nothing behind. A count that
// reaches 255 stays until the index is made anew, which costs time only.
//
// Rows lie in slabs that never move; `slabs` has their addresses, and a row's number is its handle.
// A row is embedding, optimizer state, int32 `updates`, and from the next 32 bytes on its record. A
// bit for each row number says that it is free. New rows get the lowest free numbers, then the next
// ones, in the order in which their keys first come in the call. Rows that a call evicts are free
// at once, or wait in limbo for as long as the call may be taken back.
//
// Phases. What one kernel of a call writes only later kernels read: a search never runs beside an
// insertion or an erasure. So keys that are entered are known to be absent and distinct (repeated
// ones are found among the missing before), a slot is claimed by one compare-and-swap of 4 tags,
// and nobody waits for another thread's entry.
//
// What is visible (handles, status, rows, metadata, who is evicted) depends on the calls alone, not
// on the order of threads; places in the index do, and are not visible.
//
// Floor. Per key that is found, with its embedding copied out: key 8, table 4, tags 32 (a sector),
// entry 32, row 4 D, output 4 D, status 1. At load 0.75 a search looks at 1.06 buckets and 1.03
// entries for a key that is there, at 1.4 buckets for one that is not (pytest -s -k
// emulated_cuda_store_looks_at_few_buckets prints them). For D = 64: 590 bytes, at 4.8 TB/s 8.1 G
// keys/s. Four loads depend on each other: key, tags, entry, row (the slab's address comes from a
// cache). find_or_insert adds handles 32, lists and flags 32, and the record's sector, read and
// written, 64: 720 bytes, 6.7 G keys/s; three kernels look at index, records and rows in turn.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nestpipe/cuda/stream.h"
#include "nestpipe/row_storage.h"

namespace nestpipe {
namespace cuda {

constexpr int kSlotsPerBucket = 15;
constexpr std::uint32_t kNoRowNumber = 0xFFFFFFFFu;

struct alignas(16) IndexEntry {
  std::int64_t key;
  std::uint32_t row;
  std::int32_t table;
};

struct DeviceIndex {
  std::uint32_t* tags;  // [num_buckets, 4], the last byte of a bucket its count
  IndexEntry* entries;  // [num_buckets, kSlotsPerBucket]
  std::int64_t num_buckets;
};

// 32 bytes in a row's stride. `mark` is kUnmarked but while keys are erased.
struct alignas(32) RowRecord {
  std::int64_t key, last_used, frequency;
  std::int32_t table, mark;
};
constexpr std::int32_t kUnmarked = 0x7FFFFFFF;

// In float32 words but for dim.
struct RowShape {
  DataType data_type;
  float state_init;
  std::int64_t dim, embedding_words, state_floats, row_floats;
  std::int64_t used() const { return embedding_words + state_floats + 1; }
};

// A table, as 8-byte words, in device memory. Kinds and rules as in init.h and eviction.h.
struct DeviceTable {
  std::uint64_t hash, seed;
  std::int64_t init_kind;
  double init[4];
  std::int64_t absent_kind;  // What keys without a row read.
  double absent[4];
  std::int64_t quota;  // -1: no limit.
  std::int64_t rule, keep, steps, interval;
};

// What a store counts, as 8-byte words, in device memory. Python reads it; see StoreState in
// store/device_state.py.
struct DeviceTableState {
  std::int64_t size, num_new, inserted, evicted, expired, refused, wanted, room;
};
struct DeviceState {
  std::int64_t num_rows;      // Numbers ever given out.
  std::int64_t num_free;      // Of these.
  std::int64_t num_missing;   // Of the last search_missing.
  std::int64_t num_new;       // Distinct ones of these.
  std::int64_t num_accepted;  // Of these that the last insert_missing gave rows.
  std::int64_t num_chosen;    // Rows that the last listing or eviction saw.
  std::int64_t bad_handles;   // Handles that were never given out, so far; they were skipped.
  std::int64_t bad_tables;    // Table numbers out of range, so far; such keys are absent.
  std::int64_t lost_keys;     // Pairs that found no slot: the index was too small. Never.
  std::int64_t unused[7];
  // DeviceTableState [num_tables] follows.
};

struct StoreView {
  DeviceIndex index;
  float* const* slabs;
  std::int64_t rows_per_slab;  // a power of two
  RowShape shape;
  const DeviceTable* tables;
  std::int64_t num_tables;
  std::uint32_t* free_rows;  // bits; zero behind num_rows
  DeviceState* state;
};

struct DeviceKeys {
  const std::int64_t* keys;    // [size]
  const std::int32_t* tables;  // [size]
  std::int64_t size;           // < 2^31
};

// What find and find_or_insert answer; any of them may be null. The KeyStatus of a key whose table
// is out of range is kAbsent.
struct DeviceAnswer {
  std::int64_t* handles;  // [size], -1: none
  std::uint8_t* status;   // [size] KeyStatus
  float* embeddings;      // [size, dim]
};

void store_find(const StoreView& store, const DeviceKeys& in, const DeviceAnswer& out,
                Stream stream);

// The first half of find_or_insert: handles of the keys that are there, -1 for the missing ones,
// which are listed in `work`; how many there are, and how many of them are new in each table, in
// the state. Changes nothing else.
std::size_t store_missing_work_bytes(std::int64_t size);
void store_search_missing(const StoreView& store, const DeviceKeys& in, std::int64_t* handles,
                          void* work, Stream stream);

// Rows that a call evicted and that may come back: out of the index, their numbers not free, their
// records and contents untouched but for the table. rows[0]: how many; null: rows that leave are
// free at once.
struct DeviceLimbo {
  std::uint32_t* rows;  // [1 + most]
  std::int64_t most;
};

// What the host makes of the state between the two halves.
struct InsertPlan {
  std::int64_t num_missing, num_new;
  std::int64_t num_rows;       // of the state
  bool reuses;                 // some row numbers are free, or will be
  const std::int64_t* evicts;  // [num_evicts] tables whose rule is asked
  std::int64_t num_evicts;
  const std::int64_t* refuses;  // [num_refuses] tables that may have no room for all their keys
  std::int64_t num_refuses;
  DeviceLimbo limbo;  // with rows[0] == 0; or none
};

struct UseOfKeys {
  const std::int64_t* counts;  // [size] >= 0, or null: 1 each
  std::int64_t batch;          // -1: last_used stays, nothing is evicted
};

// The second half, on memory that suffices: uses what was found, evicts, numbers and writes new
// rows. out.handles is what the first half wrote; status kFound, kInserted (once for each key) or
// kRefused.
std::size_t store_insert_work_bytes(const StoreView& store, const InsertPlan& plan);
void store_insert_missing(const StoreView& store, const DeviceKeys& in, const UseOfKeys& use,
                          const InsertPlan& plan, const DeviceAnswer& out, void* missing,
                          void* work, Stream stream);

// Rows with the lowest ranks (eviction.h) of a table leave, as many as its rule says for num_new
// more. work: store_evict_work_bytes of row numbers.
std::size_t store_evict_work_bytes(std::int64_t num_rows);
void store_evict(const StoreView& store, std::int64_t table, std::int64_t batch,
                 std::int64_t num_rows, const DeviceLimbo& limbo, void* work, Stream stream);
// The numbers of rows in limbo are free.
void store_free_limbo(const StoreView& store, const DeviceLimbo& limbo, Stream stream);
// Rows in limbo are in the index again, which has slots for them.
void store_bring_back(const StoreView& store, const DeviceLimbo& limbo, Stream stream);
// keys, tables [most]: of the rows in limbo, in their order there, which means nothing.
void store_limbo_keys(const StoreView& store, const DeviceLimbo& limbo, std::int64_t* keys,
                      std::int64_t* tables, Stream stream);

// status [size]: kFound at the first occurrence of a key that was there, else kAbsent. work: 4
// bytes a key.
void store_erase(const StoreView& store, const DeviceKeys& in, std::uint8_t* status, void* work,
                 Stream stream);
// Removes the keys of a table.
void store_clear_table(const StoreView& store, std::int64_t table, std::int64_t num_rows,
                       Stream stream);
// Enters all pairs of the store's index into `to`, which is empty (tags zero) and has slots for
// them.
void store_rehash(const StoreView& store, const DeviceIndex& to, Stream stream);
// Keys and handles of a table by ascending handle; num_chosen of the state says how many.
std::size_t store_list_work_bytes(std::int64_t num_rows);
void store_list_table(const StoreView& store, std::int64_t table, std::int64_t num_rows,
                      std::int64_t* keys, std::int64_t* handles, void* work, Stream stream);

// Rows by handle; handles of -1 are skipped, others that were never given out are, too, and noted.
struct DeviceHandles {
  const std::int64_t* handles;
  std::int64_t size;
};
// out [index[j] or j, row_floats]; where the handle is -1, what the key reads without a row.
void store_read_rows(const StoreView& store, const DeviceHandles& rows, const DeviceKeys& in,
                     const std::int64_t* index, float* out, std::int64_t num_out, Stream stream);
void store_write_rows(const StoreView& store, const DeviceHandles& rows, const float* values,
                      Stream stream);
// out [size, dim], widened; the same where the handle is -1.
void store_read_embeddings(const StoreView& store, const DeviceHandles& rows, const DeviceKeys& in,
                           float* out, Stream stream);
void store_write_embeddings(const StoreView& store, const DeviceHandles& rows, const float* values,
                            Stream stream);
// -1 and 0 where the handle is -1.
void store_read_metadata(const StoreView& store, const DeviceHandles& rows, std::int64_t* last_used,
                         std::int64_t* frequency, Stream stream);
void store_write_metadata(const StoreView& store, const DeviceHandles& rows,
                          const std::int64_t* last_used, const std::int64_t* frequency,
                          Stream stream);

}  // namespace cuda
}  // namespace nestpipe
