// Rows of a store in device memory by handle: whole rows, embeddings and metadata in and out; and
// the keys of a table with their handles.
#include "../cuda/carve.h"
#include "../cuda/scan.cuh"
#include "device_rows.cuh"

namespace nestpipe {
namespace cuda {
namespace {

constexpr int kFloats = kFloatsPerVector;

// A row's vector of 4 words of a row as callers see it: zeros behind what is used. A row has
// vectors up to its record.
__device__ __forceinline__ float4 used_words(const float* row, std::int64_t vector,
                                             std::int64_t used) {
  const std::int64_t first = vector * kFloats;
  if (first >= used) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float4 words = load_once(reinterpret_cast<const float4*>(row) + vector);
  if (first + 1 >= used) words.y = 0.0f;
  if (first + 2 >= used) words.z = 0.0f;
  if (first + 3 >= used) words.w = 0.0f;
  return words;
}

// A row of threads (x) for each row.
__global__ void read_rows(StoreView store, RowPlaces places, DeviceHandles rows, DeviceKeys in,
                          const std::int64_t* index, std::int64_t used, float* out,
                          std::int64_t num_out) {
  const std::int64_t j = chosen_position();
  if (j >= rows.size) return;
  const std::int64_t to = index == nullptr ? j : index[j];
  if (to < 0 || to >= num_out) {
    if (threadIdx.x == 0) add(&store.state->bad_handles, 1);
    return;
  }
  const RowShape& shape = store.shape;
  float* const target = out + to * shape.row_floats;
  const std::int64_t handle = rows.handles[j];
  if (handle >= 0 && handle < store.state->num_rows) {
    const float* const row = places.row(static_cast<std::uint32_t>(handle));
    NESTPIPE_ROLLED
    for (std::int64_t v = threadIdx.x; v < shape.row_floats / kFloats; v += blockDim.x) {
      reinterpret_cast<float4*>(target)[v] = used_words(row, v, used);
    }
    return;
  }
  const std::int32_t table = in.tables[j];
  const bool known = table >= 0 && table < store.num_tables;
  if (threadIdx.x == 0 && handle != -1) add(&store.state->bad_handles, 1);
  if (threadIdx.x == 0 && !known) add(&store.state->bad_tables, 1);
  NESTPIPE_ROLLED
  for (std::int64_t word = threadIdx.x; word < shape.row_floats; word += blockDim.x) {
    target[word] = known ? initial_word(store, store.tables[table], true, in.keys[j], word) : 0.0f;
  }
}

__global__ void write_rows(StoreView store, RowPlaces places, DeviceHandles rows, std::int64_t used,
                           const float* values) {
  const std::int64_t j = chosen_position();
  if (j >= rows.size) return;
  const std::int64_t handle = rows.handles[j];
  if (handle < 0 || handle >= store.state->num_rows) {
    if (threadIdx.x == 0 && handle != -1) add(&store.state->bad_handles, 1);
    return;
  }
  float* const row = places.row(static_cast<std::uint32_t>(handle));
  const float* const from = values + j * store.shape.row_floats;
  for (std::int64_t v = threadIdx.x; v * kFloats < used; v += blockDim.x) {
    reinterpret_cast<float4*>(row)[v] = used_words(from, v, used);
  }
}

__global__ void write_embeddings(StoreView store, RowPlaces places, DeviceHandles rows,
                                 const float* values) {
  const std::int64_t j = chosen_position();
  if (j >= rows.size) return;
  const std::int64_t handle = rows.handles[j];
  if (handle < 0 || handle >= store.state->num_rows) {
    if (threadIdx.x == 0 && handle != -1) add(&store.state->bad_handles, 1);
    return;
  }
  const RowShape& shape = store.shape;
  float* const row = places.row(static_cast<std::uint32_t>(handle));
  const float* const from = values + j * shape.dim;
  NESTPIPE_ROLLED
  for (std::int64_t word = threadIdx.x; word < shape.embedding_words; word += blockDim.x) {
    if (shape.data_type == DataType::kFloat32) {
      row[word] = from[word];
      continue;
    }
    std::uint32_t bits = 0;
    for (int half = 0; half < 2; ++half) {
      if (2 * word + half >= shape.dim) break;
      const float value = from[2 * word + half];
      const std::uint32_t rounded = shape.data_type == DataType::kBFloat16
                                        ? float_to_bfloat16(value)
                                        : float_to_float16(value);
      bits |= rounded << 16 * half;
    }
    row[word] = bits_float(bits);
  }
}

__global__ void read_metadata(StoreView store, RowPlaces places, DeviceHandles rows,
                              std::int64_t* last_used, std::int64_t* frequency) {
  const std::int64_t j = global_thread();
  if (j >= rows.size) return;
  const std::uint32_t number = row_of_handle(store, rows.handles[j]);
  const bool there = number != kNoRowNumber;
  const RowRecord* const record = there ? places.record_of(number) : nullptr;
  last_used[j] = there ? record->last_used : -1;
  frequency[j] = there ? record->frequency : 0;
}

__global__ void write_metadata(StoreView store, RowPlaces places, DeviceHandles rows,
                               const std::int64_t* last_used, const std::int64_t* frequency) {
  const std::int64_t j = global_thread();
  if (j >= rows.size) return;
  const std::uint32_t number = row_of_handle(store, rows.handles[j]);
  if (number == kNoRowNumber) return;
  RowRecord* const record = places.record_of(number);
  record->last_used = last_used[j];
  record->frequency = frequency[j];
}

// Of rows that have one, or had it before they went into limbo.
__global__ void read_keys(RowPlaces places, const std::uint32_t* limbo, std::int64_t most,
                          std::int64_t* keys, std::int64_t* tables) {
  const std::int64_t i = global_thread();
  if (i >= most || i >= limbo[0]) return;
  const RowRecord* const record = places.record_of(limbo[1 + i]);
  keys[i] = record->key;
  tables[i] = table_in_limbo(record->table);
}

__device__ __forceinline__ bool is_of_table(const StoreView& store, const RowPlaces& places,
                                            std::int64_t row, std::int64_t table) {
  return !is_free(store, row) && places.record_of(static_cast<std::uint32_t>(row))->table == table;
}

__global__ void flag_rows(StoreView store, RowPlaces places, std::int64_t table,
                          std::int64_t num_rows, std::int32_t* flags) {
  const std::int64_t r = global_thread();
  if (r < num_rows) flags[r] = is_of_table(store, places, r, table) ? 1 : 0;
}

__global__ void list_rows(StoreView store, RowPlaces places, std::int64_t table,
                          std::int64_t num_rows, const std::int32_t* before, std::int64_t* keys,
                          std::int64_t* handles) {
  const std::int64_t r = global_thread();
  if (r >= num_rows || !is_of_table(store, places, r, table)) return;
  keys[before[r]] = places.record_of(static_cast<std::uint32_t>(r))->key;
  handles[before[r]] = r;
}

// Threads of a block as (lanes of a row, rows).
template <typename Kernel, typename... Arguments>
void launch_rows(Kernel kernel, std::int64_t size, std::int64_t units, Stream stream,
                 const Arguments&... arguments) {
  if (size == 0) return;
  const dim3 threads = row_block(units);
  launch(kernel, num_blocks(size, threads.y), threads, 0, stream, arguments...);
}

}  // namespace

void store_read_rows(const StoreView& store, const DeviceHandles& rows, const DeviceKeys& in,
                     const std::int64_t* index, float* out, std::int64_t num_out, Stream stream) {
  launch_rows(read_rows, rows.size, store.shape.row_floats / kFloats, stream, store,
              places_of(store), rows, in, index, store.shape.used(), out, num_out);
}

void store_write_rows(const StoreView& store, const DeviceHandles& rows, const float* values,
                      Stream stream) {
  launch_rows(write_rows, rows.size, store.shape.row_floats / kFloats, stream, store,
              places_of(store), rows, store.shape.used(), values);
}

void store_write_embeddings(const StoreView& store, const DeviceHandles& rows, const float* values,
                            Stream stream) {
  launch_rows(write_embeddings, rows.size, store.shape.embedding_words, stream, store,
              places_of(store), rows, values);
}

void store_read_metadata(const StoreView& store, const DeviceHandles& rows, std::int64_t* last_used,
                         std::int64_t* frequency, Stream stream) {
  if (rows.size == 0) return;
  launch(read_metadata, num_blocks(rows.size, kThreads), kThreads, 0, stream, store,
         places_of(store), rows, last_used, frequency);
}

void store_write_metadata(const StoreView& store, const DeviceHandles& rows,
                          const std::int64_t* last_used, const std::int64_t* frequency,
                          Stream stream) {
  if (rows.size == 0) return;
  launch(write_metadata, num_blocks(rows.size, kThreads), kThreads, 0, stream, store,
         places_of(store), rows, last_used, frequency);
}

void store_limbo_keys(const StoreView& store, const DeviceLimbo& limbo, std::int64_t* keys,
                      std::int64_t* tables, Stream stream) {
  if (limbo.most == 0) return;
  launch(read_keys, num_blocks(limbo.most, kThreads), kThreads, 0, stream, places_of(store),
         limbo.rows, limbo.most, keys, tables);
}

std::size_t store_list_work_bytes(std::int64_t num_rows) {
  Carve carve(nullptr);
  carve.take<std::int32_t>(num_rows);
  carve.take<std::int32_t>(scan_work_items(num_rows));
  return carve.used();
}

void store_list_table(const StoreView& store, std::int64_t table, std::int64_t num_rows,
                      std::int64_t* keys, std::int64_t* handles, void* work, Stream stream) {
  if (num_rows == 0) return;
  Carve carve(work);
  auto* const before = carve.take<std::int32_t>(num_rows);
  auto* const scan_work = carve.take<std::int32_t>(scan_work_items(num_rows));
  const RowPlaces places = places_of(store);
  const unsigned blocks = num_blocks(num_rows, kThreads);
  launch(flag_rows, blocks, kThreads, 0, stream, store, places, table, num_rows, before);
  exclusive_sum(before, num_rows, scan_work, &store.state->num_chosen, stream);
  launch(list_rows, blocks, kThreads, 0, stream, store, places, table, num_rows, before, keys,
         handles);
}

}  // namespace cuda
}  // namespace nestpipe
