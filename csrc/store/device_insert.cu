// The second half of find_or_insert: what was found is used, rows leave, new keys get rows.
//
// New keys are numbered in the order in which they first come; the first ones get the lowest free
// row numbers, the others those after all that were ever given out. A table without room for all
// its new keys refuses the last ones.
#include "device_copies.cuh"
#include "device_missing.cuh"
#include "device_rows.cuh"
#include "key_status.cuh"

namespace nestpipe {
namespace cuda {
namespace {

constexpr std::uint64_t kMostFrequent = 0x7FFFFFFFFFFFFFFFull;

struct NewRows {
  std::uint32_t* row;        // [num_new]; kNoRowNumber: refused
  std::int32_t* rank;        // [num_new] of the accepted ones before; of those of a table before
  std::uint32_t* free_rows;  // [num_new] the lowest free numbers
  std::int32_t* words;       // [num_words] free numbers in the words of bits before
  std::int32_t* scan_work;
  void* evict_work;
  std::int64_t num_words;
};

NewRows lay_out_insert(Carve& carve, const StoreView&, const InsertPlan& plan) {
  NewRows rows{};
  rows.num_words = plan.reuses ? (plan.num_rows + 31) / 32 : 0;
  rows.row = carve.take<std::uint32_t>(plan.num_new);
  rows.rank = carve.take<std::int32_t>(plan.num_new);
  rows.free_rows = carve.take<std::uint32_t>(plan.num_new);
  rows.words = carve.take<std::int32_t>(rows.num_words);
  const std::int64_t longest = rows.num_words > plan.num_new ? rows.num_words : plan.num_new;
  rows.scan_work = carve.take<std::int32_t>(scan_work_items(longest));
  rows.evict_work =
      carve.take<unsigned char>(plan.num_evicts > 0 ? store_evict_work_bytes(plan.num_rows) : 0);
  return rows;
}

// Frequencies stop at 2^63 - 1. Where `count` is small, others may see more than that for a moment;
// whoever makes it more sets it right afterwards, so the last change of all does.
__device__ __forceinline__ void count_use(RowRecord* record, std::int64_t count,
                                          std::int64_t batch) {
  if (batch >= 0) store_racing(&record->last_used, batch);
  auto* const frequency = reinterpret_cast<unsigned long long*>(&record->frequency);
  const auto more = static_cast<unsigned long long>(count);
  if (more < 1ull << 31) {
    if (atomicAdd(frequency, more) + more > kMostFrequent) {
      store_racing(frequency, static_cast<unsigned long long>(kMostFrequent));
    }
    return;
  }
  unsigned long long seen = load_racing(frequency);
  for (;;) {
    const unsigned long long sum = seen > kMostFrequent - more ? kMostFrequent : seen + more;
    const unsigned long long before = atomicCAS(frequency, seen, sum);
    if (before == seen) return;
    seen = before;
  }
}

// Of a warp's lanes, `takes_part`; the lanes of a row that count 1 each go together.
__device__ __forceinline__ void use_row(const RowPlaces& places, const UseOfKeys& use,
                                        bool takes_part, std::uint32_t number, std::int64_t j) {
  const unsigned active = __ballot_sync(kAllLanes, takes_part);
  if (!takes_part) return;
  if (use.counts != nullptr) {
    return count_use(places.record_of(number), use.counts[j], use.batch);
  }
  const unsigned same = __match_any_sync(active, number);
  if ((same & lanes_before(threadIdx.x % kWarpSize)) != 0) return;
  count_use(places.record_of(number), __popc(same), use.batch);
}

__global__ void use_found(RowPlaces places, DeviceKeys in, UseOfKeys use, DeviceAnswer out) {
  const std::int64_t j = global_thread();
  const std::int64_t handle = j < in.size ? out.handles[j] : -1;
  if (j < in.size) out.status[j] = handle >= 0 ? kFoundKey : kAbsentKey;
  use_row(places, use, handle >= 0, static_cast<std::uint32_t>(handle), j);
}

__device__ __forceinline__ std::int32_t table_of_new(const DeviceKeys& in,
                                                     const MissingKeys& missing, std::int64_t i) {
  return in.tables[missing.position[missing.new_at[i]]];
}

__global__ void accept_all(NewRows rows, std::int64_t num_new) {
  const std::int64_t i = global_thread();
  if (i < num_new) rows.row[i] = 0;
}

__global__ void flag_table(DeviceKeys in, MissingKeys missing, NewRows rows, std::int64_t num_new,
                           std::int64_t table) {
  const std::int64_t i = global_thread();
  if (i < num_new) rows.rank[i] = table_of_new(in, missing, i) == table ? 1 : 0;
}

__global__ void find_room(StoreView store, std::int64_t table) {
  DeviceTableState* const state = table_state(store, table);
  const std::int64_t room = store.tables[table].quota - state->size;
  state->room = room > 0 ? room : 0;
}

__global__ void refuse_last(StoreView store, DeviceKeys in, MissingKeys missing, NewRows rows,
                            std::int64_t num_new, std::int64_t table) {
  const std::int64_t i = global_thread();
  if (i >= num_new || table_of_new(in, missing, i) != table) return;
  if (rows.rank[i] >= table_state(store, table)->room) rows.row[i] = kNoRowNumber;
}

__global__ void flag_accepted(NewRows rows, std::int64_t num_new) {
  const std::int64_t i = global_thread();
  if (i < num_new) rows.rank[i] = rows.row[i] != kNoRowNumber ? 1 : 0;
}

__global__ void count_free(StoreView store, NewRows rows) {
  const std::int64_t w = global_thread();
  if (w < rows.num_words) rows.words[w] = __popc(store.free_rows[w]);
}

__global__ void list_free(StoreView store, NewRows rows, std::int64_t num_new) {
  const std::int64_t w = global_thread();
  if (w >= rows.num_words) return;
  std::int64_t at = rows.words[w];
  for (std::uint32_t bits = store.free_rows[w]; bits != 0 && at < num_new; bits &= bits - 1) {
    const int bit = __ffs(static_cast<int>(bits)) - 1;
    rows.free_rows[at++] = static_cast<std::uint32_t>(w * 32 + bit);
  }
}

// A warp for each new key.
__global__ void write_new(StoreView store, RowPlaces places, DeviceKeys in, MissingKeys missing,
                          NewRows rows, std::int64_t num_new) {
  const std::int64_t i = global_thread() / kWarpSize;
  const unsigned lane = threadIdx.x % kWarpSize;
  if (i >= num_new) return;
  if (rows.row[i] == kNoRowNumber) return;
  const std::int32_t here = missing.position[missing.new_at[i]];
  const std::int64_t key = in.keys[here];
  const std::int32_t table = in.tables[here];
  const std::int64_t rank = rows.rank[i], num_free = store.state->num_free;
  const std::uint32_t number =
      rank < num_free ? rows.free_rows[rank]
                      : static_cast<std::uint32_t>(store.state->num_rows + rank - num_free);
  float* const row = places.row(number);
  for (std::int64_t word = lane; word < places.record; word += kWarpSize) {
    row[word] = initial_word(store, store.tables[table], false, key, word);
  }
  __syncwarp();
  if (lane != 0) return;
  rows.row[i] = number;
  *places.record_of(number) = {key, -1, 0, table, kUnmarked};
  if (rank < num_free) {
    change_word(store.free_rows + number / 32,
                [number](std::uint32_t word) { return word & ~(1u << number % 32); });
  }
  const std::uint64_t hash = hash_key(store.tables[table].hash, key);
  if (!enter_pair(store.index, hash, {key, number, table})) add(&store.state->lost_keys, 1);
}

__global__ void settle(StoreView store) {
  DeviceState* const state = store.state;
  const std::int64_t beyond = state->num_accepted - state->num_free;
  state->num_rows += beyond > 0 ? beyond : 0;
  state->num_free = beyond < 0 ? -beyond : 0;
}

__global__ void finish_missing(StoreView store, RowPlaces places, DeviceKeys in, UseOfKeys use,
                               MissingKeys missing, NewRows rows, std::int64_t num_missing,
                               DeviceAnswer out) {
  const std::int64_t i = global_thread();
  std::int64_t j = 0;
  std::uint32_t number = kNoRowNumber;
  std::int32_t table = 0;
  bool first = false;
  if (i < num_missing) {
    j = missing.position[i];
    table = in.tables[j];
    number = rows.row[missing.number[missing.entry[i]]];
    first = missing.first[missing.entry[i]] == i;
    const bool has_row = number != kNoRowNumber;
    out.handles[j] = has_row ? std::int64_t{number} : -1;
    out.status[j] = !has_row ? kRefusedKey : first ? kInsertedKey : kFoundKey;
  }
  const unsigned firsts = __ballot_sync(kAllLanes, first);
  if (first) {
    const bool inserted = number != kNoRowNumber;
    const unsigned same = __match_any_sync(firsts, table * 2 + (inserted ? 1 : 0));
    if ((same & lanes_before(threadIdx.x % kWarpSize)) == 0) {
      DeviceTableState* const state = table_state(store, table);
      add(inserted ? &state->inserted : &state->refused, __popc(same));
      if (inserted) add(&state->size, __popc(same));
    }
  }
  use_row(places, use, number != kNoRowNumber, number, j);
}

}  // namespace

std::size_t store_insert_work_bytes(const StoreView& store, const InsertPlan& plan) {
  Carve carve(nullptr);
  lay_out_insert(carve, store, plan);
  return carve.used();
}

void store_insert_missing(const StoreView& store, const DeviceKeys& in, const UseOfKeys& use,
                          const InsertPlan& plan, const DeviceAnswer& out, void* missing_work,
                          void* work, Stream stream) {
  Carve missing_carve(missing_work), carve(work);
  const MissingKeys missing = lay_out_missing(missing_carve, in.size);
  const NewRows rows = lay_out_insert(carve, store, plan);
  const RowPlaces places = places_of(store);
  if (in.size > 0) {
    launch(use_found, num_blocks(in.size, kThreads), kThreads, 0, stream, places, in, use, out);
  }
  for (std::int64_t k = 0; k < plan.num_evicts; ++k) {
    store_evict(store, plan.evicts[k], use.batch, plan.num_rows, plan.limbo, rows.evict_work,
                stream);
  }
  const std::int64_t num_new = plan.num_new;
  if (num_new > 0) {
    const unsigned blocks = num_blocks(num_new, kThreads);
    launch(accept_all, blocks, kThreads, 0, stream, rows, num_new);
    for (std::int64_t k = 0; k < plan.num_refuses; ++k) {
      const std::int64_t table = plan.refuses[k];
      launch(find_room, 1, 1, 0, stream, store, table);
      launch(flag_table, blocks, kThreads, 0, stream, in, missing, rows, num_new, table);
      exclusive_sum(rows.rank, num_new, rows.scan_work, &store.state->num_accepted, stream);
      launch(refuse_last, blocks, kThreads, 0, stream, store, in, missing, rows, num_new, table);
    }
    launch(flag_accepted, blocks, kThreads, 0, stream, rows, num_new);
    exclusive_sum(rows.rank, num_new, rows.scan_work, &store.state->num_accepted, stream);
    if (rows.num_words > 0) {
      const unsigned word_blocks = num_blocks(rows.num_words, kThreads);
      launch(count_free, word_blocks, kThreads, 0, stream, store, rows);
      exclusive_sum(rows.words, rows.num_words, rows.scan_work, &store.state->num_free, stream);
      launch(list_free, word_blocks, kThreads, 0, stream, store, rows, num_new);
    }
    launch(write_new, num_blocks(num_new * kWarpSize, kThreads), kThreads, 0, stream, store, places,
           in, missing, rows, num_new);
    launch(settle, 1, 1, 0, stream, store);
    launch(finish_missing, num_blocks(plan.num_missing, kThreads), kThreads, 0, stream, store,
           places, in, use, missing, rows, plan.num_missing, out);
  }
  if (out.embeddings == nullptr) return;
  copy_found(store, {out.handles, in.size}, out.embeddings, stream);
  if (plan.num_refuses > 0) {
    fill_without_row(store, in, nullptr, out.status, out.embeddings, stream);
  }
}

}  // namespace cuda
}  // namespace nestpipe
