// Search of a store in device memory, and copies of embeddings on their way out.
#include "device_copies.cuh"
#include "device_rows.cuh"
#include "key_status.cuh"

namespace nestpipe {
namespace cuda {
namespace {

template <typename Move>
__global__ void find_rows(StoreView store, RowPlaces places, int lanes, DeviceKeys in,
                          DeviceAnswer out) {
  const std::int64_t j = global_thread();
  std::uint32_t number = kNoRowNumber;
  if (j < in.size) {
    const std::int32_t table = in.tables[j];
    if (has_table(store, table)) number = find_row(store, in.keys[j], table);
    const bool found = number != kNoRowNumber;
    if (out.handles != nullptr) out.handles[j] = found ? std::int64_t{number} : -1;
    if (out.status != nullptr) out.status[j] = found ? kFoundKey : kAbsentKey;
  }
  if (out.embeddings == nullptr) return;
  copy_embeddings<Move>(store, places, lanes, number, j - threadIdx.x % kWarpSize, out.embeddings);
}

template <typename Move>
__global__ void copy_by_handle(StoreView store, RowPlaces places, int lanes, DeviceHandles rows,
                               float* out) {
  const std::int64_t j = global_thread();
  const std::uint32_t number = j < rows.size ? row_of_handle(store, rows.handles[j]) : kNoRowNumber;
  copy_embeddings<Move>(store, places, lanes, number, j - threadIdx.x % kWarpSize, out);
}

// A warp goes through 32 keys and makes the values of those without a row, element by lane.
// Only one of handles and status is given.
__global__ void fill_absent(StoreView store, DeviceKeys in, const std::int64_t* handles,
                            const std::uint8_t* status, float* out) {
  const std::int64_t j = global_thread();
  const unsigned lane = threadIdx.x % kWarpSize;
  bool absent = false;
  std::int64_t key = 0;
  std::int32_t table = 0;
  if (j < in.size) {
    absent =
        status != nullptr ? status[j] != kFoundKey && status[j] != kInsertedKey : handles[j] == -1;
    key = in.keys[j];
    table = in.tables[j];
  }
  for (unsigned left = __ballot_sync(kAllLanes, absent); left != 0; left &= left - 1) {
    const int source = __ffs(static_cast<int>(left)) - 1;
    const std::int64_t of_key = __shfl_sync(kAllLanes, key, source);
    const std::int32_t of_table = __shfl_sync(kAllLanes, table, source);
    float* const row = out + (j - lane + source) * store.shape.dim;
    const bool known = of_table >= 0 && of_table < store.num_tables;
    for (std::int64_t word = lane; word < store.shape.embedding_words; word += kWarpSize) {
      const float value =
          known ? initial_word(store, store.tables[of_table], true, of_key, word) : 0.0f;
      if (store.shape.data_type == DataType::kFloat32) {
        row[word] = value;
      } else {
        MoveHalves::store(store.shape, row, word, float_bits(value));
      }
    }
  }
}

}  // namespace

void copy_found(const StoreView& store, const DeviceHandles& rows, float* out, Stream stream) {
  if (rows.size == 0) return;
  const RowPlaces places = places_of(store);
  with_moves(store.shape, out, [&](auto move, int lanes) {
    launch(copy_by_handle<decltype(move)>, num_blocks(rows.size, kThreads), kThreads, 0, stream,
           store, places, lanes, rows, out);
  });
}

void fill_without_row(const StoreView& store, const DeviceKeys& in, const std::int64_t* handles,
                      const std::uint8_t* status, float* out, Stream stream) {
  if (in.size == 0) return;
  launch(fill_absent, num_blocks(in.size, kThreads), kThreads, 0, stream, store, in, handles,
         status, out);
}

void store_find(const StoreView& store, const DeviceKeys& in, const DeviceAnswer& out,
                Stream stream) {
  if (in.size == 0) return;
  const RowPlaces places = places_of(store);
  with_moves(store.shape, out.embeddings, [&](auto move, int lanes) {
    launch(find_rows<decltype(move)>, num_blocks(in.size, kThreads), kThreads, 0, stream, store,
           places, lanes, in, out);
  });
  if (out.embeddings != nullptr) {
    fill_without_row(store, in, out.handles, out.status, out.embeddings, stream);
  }
}

void store_read_embeddings(const StoreView& store, const DeviceHandles& rows, const DeviceKeys& in,
                           float* out, Stream stream) {
  copy_found(store, rows, out, stream);
  fill_without_row(store, in, rows.handles, nullptr, out, stream);
}

}  // namespace cuda
}  // namespace nestpipe
