// Erasing keys of a store in device memory, and its index made anew.
//
// A key may come several times in a call: of the positions with its row the first one is left in
// the row's record, by one kernel; the next one answers, the last one takes the rows out, each by
// the thread of that position.
#include "device_rows.cuh"
#include "key_status.cuh"

namespace nestpipe {
namespace cuda {
namespace {

__global__ void mark_erased(StoreView store, RowPlaces places, DeviceKeys in,
                            std::uint32_t* numbers) {
  const std::int64_t j = global_thread();
  if (j >= in.size) return;
  const std::int32_t table = in.tables[j];
  const std::uint32_t number =
      has_table(store, table) ? find_row(store, in.keys[j], table) : kNoRowNumber;
  numbers[j] = number;
  if (number == kNoRowNumber) return;
  atomicMin(&places.record_of(number)->mark, static_cast<std::int32_t>(j));
}

__global__ void answer_erased(RowPlaces places, DeviceKeys in, const std::uint32_t* numbers,
                              std::uint8_t* status) {
  const std::int64_t j = global_thread();
  if (j >= in.size) return;
  const bool first = numbers[j] != kNoRowNumber && places.record_of(numbers[j])->mark == j;
  status[j] = first ? kFoundKey : kAbsentKey;
}

__global__ void erase_rows(StoreView store, RowPlaces places, DeviceKeys in,
                           const std::uint32_t* numbers, const std::uint8_t* status) {
  const std::int64_t j = global_thread();
  const bool goes = j < in.size && status[j] == kFoundKey;
  const std::int32_t table = goes ? free_row(store, places, numbers[j]) : 0;
  count_gone(store, goes, table, true);
}

// A thread for each slot.
__global__ void enter_again(StoreView store, DeviceIndex to) {
  const std::int64_t slot = global_thread();
  if (slot >= store.index.num_buckets * kSlotsPerBucket) return;
  const std::int64_t bucket = slot / kSlotsPerBucket;
  const int at = static_cast<int>(slot % kSlotsPerBucket);
  const std::uint32_t word = store.index.tags[bucket * 4 + at / 4];
  if ((word >> at % 4 * 8 & 0xFFu) == 0) return;
  const IndexEntry entry = store.index.entries[slot];
  const std::uint64_t hash = hash_key(store.tables[entry.table].hash, entry.key);
  if (!enter_pair(to, hash, entry)) add(&store.state->lost_keys, 1);
}

}  // namespace

void store_erase(const StoreView& store, const DeviceKeys& in, std::uint8_t* status, void* work,
                 Stream stream) {
  if (in.size == 0) return;
  const RowPlaces places = places_of(store);
  auto* const numbers = static_cast<std::uint32_t*>(work);
  const unsigned blocks = num_blocks(in.size, kThreads);
  launch(mark_erased, blocks, kThreads, 0, stream, store, places, in, numbers);
  launch(answer_erased, blocks, kThreads, 0, stream, places, in, numbers, status);
  launch(erase_rows, blocks, kThreads, 0, stream, store, places, in, numbers, status);
}

void store_rehash(const StoreView& store, const DeviceIndex& to, Stream stream) {
  if (store.index.num_buckets == 0) return;
  launch(enter_again, num_blocks(store.index.num_buckets * kSlotsPerBucket, kThreads), kThreads, 0,
         stream, store, to);
}

}  // namespace cuda
}  // namespace nestpipe
