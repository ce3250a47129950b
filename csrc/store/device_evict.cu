// Rows that leave a store in device memory: by a table's rule, or all of a table.
//
// A rule takes the rows with the lowest ranks (first, second, hash of the key; eviction.h) of those
// that the last two batches did not use. Hashes of a table's keys differ, so ranks never tie, and a
// threshold says who goes. It is found digit by digit from the top, 8 bits at a time: of the rows
// whose higher digits equal the threshold's, a pass counts how many have each value of the next
// one. Passes end early: where a whole set goes, and, at the beginning, where all digits are 0.
#include "../cuda/carve.h"
#include "device_rows.cuh"
#include "nestpipe/eviction.h"

namespace nestpipe {
namespace cuda {
namespace {

constexpr int kWords = 3, kDigitsOfWord = 8, kValues = 256;
constexpr unsigned kMostBlocks = 2048;  // of kernels whose threads take several rows

struct Selection {
  std::uint64_t threshold[kWords];
  std::uint64_t largest[kWords - 1];
  std::int64_t num_candidates, num_expired;
  std::int64_t left;  // to be chosen among the rows that equal the threshold so far
  std::int64_t done;
  std::uint32_t counts[kValues];
};

struct EvictWork {
  Selection* selection;
  std::uint32_t* candidates;  // row numbers, in no order
};

EvictWork lay_out_evict(Carve& carve, std::int64_t num_rows) {
  EvictWork work{};
  work.selection = carve.take<Selection>(1);
  work.candidates = carve.take<std::uint32_t>(num_rows);
  return work;
}

struct Rank {
  std::uint64_t word[kWords];
  // Without an address: words stay in registers.
  __device__ __forceinline__ std::uint64_t at(int w) const {
    return w == 0 ? word[0] : w == 1 ? word[1] : word[2];
  }
};

__device__ __forceinline__ Rank rank_of(const StoreView& store, const RowRecord& record) {
  const DeviceTable& table = store.tables[record.table];
  // From -1 on; frequencies from 0.
  const auto used = static_cast<std::uint64_t>(record.last_used + 1);
  const auto frequency = static_cast<std::uint64_t>(record.frequency);
  const bool by_frequency = table.rule == static_cast<int>(EvictionKind::kLfu);
  return {{by_frequency ? frequency : used, by_frequency ? used : frequency,
           hash_key(table.hash, record.key)}};
}

__device__ __forceinline__ std::int64_t all_threads() {
  return std::int64_t{gridDim.x} * blockDim.x;
}

__device__ __forceinline__ void raise(std::uint64_t* largest, std::uint64_t value) {
  auto* const address = reinterpret_cast<unsigned long long*>(largest);
  if (load_racing(address) < value) atomicMax(address, static_cast<unsigned long long>(value));
}

__global__ void start_selection(EvictWork work) {
  Selection* const s = work.selection;
  if (threadIdx.x < kValues) s->counts[threadIdx.x] = 0;
  if (threadIdx.x != 0) return;
  for (int w = 0; w < kWords; ++w) s->threshold[w] = 0;
  for (int w = 0; w < kWords - 1; ++w) s->largest[w] = 0;
  s->num_candidates = s->num_expired = s->left = s->done = 0;
}

__global__ void list_candidates(StoreView store, RowPlaces places, std::int64_t table,
                                std::int64_t batch, EvictWork work) {
  Selection* const s = work.selection;
  const DeviceTable& rule = store.tables[table];
  const bool expires =
      rule.rule == static_cast<int>(EvictionKind::kTtl) && batch % rule.interval == 0;
  const std::int64_t num_rows = store.state->num_rows;
  const std::int64_t lane = threadIdx.x % kWarpSize;
  for (std::int64_t r = global_thread(); r - lane < num_rows; r += all_threads()) {
    bool stays = r >= num_rows || is_free(store, r);
    bool expired = false;
    if (!stays) {
      const RowRecord record = *places.record_of(static_cast<std::uint32_t>(r));
      stays = record.table != table || record.last_used >= batch - 1;
      expired = !stays && expires && record.last_used < batch - rule.steps;
      if (!stays) {
        const Rank rank = rank_of(store, record);
        for (int w = 0; w < kWords - 1; ++w) raise(&s->largest[w], rank.word[w]);
      }
    }
    const unsigned goes = __ballot_sync(kAllLanes, !stays);
    const unsigned gone = __ballot_sync(kAllLanes, expired);
    unsigned long long base = 0;
    if (lane == 0 && goes != 0) {
      if (gone != 0) add(&s->num_expired, __popc(gone));
      base = atomicAdd(reinterpret_cast<unsigned long long*>(&s->num_candidates),
                       static_cast<unsigned long long>(__popc(goes)));
    }
    base = __shfl_sync(kAllLanes, base, 0);
    if (!stays) {
      const int before = __popc(goes & lanes_before(static_cast<unsigned>(lane)));
      work.candidates[base + static_cast<unsigned>(before)] = static_cast<std::uint32_t>(r);
    }
  }
}

// How many go. Expired rows are those used longest ago, so they are among the lowest.
__global__ void plan_selection(StoreView store, std::int64_t table, EvictWork work) {
  Selection* const s = work.selection;
  const DeviceTable& rule = store.tables[table];
  DeviceTableState* const state = table_state(store, table);
  std::int64_t wanted = s->num_expired;
  if (rule.quota >= 0 && state->size - wanted + state->num_new > rule.quota) {
    wanted = state->size + state->num_new - rule.keep;
  }
  if (wanted > s->num_candidates) wanted = s->num_candidates;
  state->wanted = wanted;
  state->expired += s->num_expired;
  state->evicted += wanted - s->num_expired;
  store.state->num_chosen = wanted;
  s->left = wanted;
  if (wanted == 0 || wanted == s->num_candidates) {
    s->done = 1;
    for (int w = 0; w < kWords; ++w) s->threshold[w] = ~std::uint64_t{0};
  }
}

__device__ __forceinline__ bool passes(const Selection& s, int word, int digit) {
  return s.done != 0 || (word < kWords - 1 && s.largest[word] >> 8 * digit == 0);
}

struct CountShared {
  unsigned counts[kValues];
};

__global__ void count_candidates(StoreView store, RowPlaces places, EvictWork work, int word,
                                 int digit) {
  Selection* const s = work.selection;
  if (passes(*s, word, digit)) return;
  CountShared& shared = shared_memory<CountShared>();
  store_racing(&shared.counts[threadIdx.x], 0u);
  __syncthreads();
  for (std::int64_t i = global_thread(); i < s->num_candidates; i += all_threads()) {
    const Rank rank = rank_of(store, *places.record_of(work.candidates[i]));
    bool equal = true;
    for (int w = 0; w < kWords; ++w) {
      equal = equal && (w >= word || rank.word[w] == s->threshold[w]);
    }
    const std::uint64_t value = rank.at(word) >> 8 * digit;
    equal = equal && value >> 8 == s->threshold[word] >> 8 * digit >> 8;
    if (equal) atomicAdd(&shared.counts[value & 0xFF], 1u);
  }
  __syncthreads();
  const unsigned count = load_racing(&shared.counts[threadIdx.x]);
  if (count != 0) atomicAdd(&s->counts[threadIdx.x], count);
}

__global__ void choose_digit(EvictWork work, int word, int digit) {
  Selection* const s = work.selection;
  if (passes(*s, word, digit)) return;
  std::uint64_t value = 0;
  while (s->counts[value] < s->left) s->left -= s->counts[value++];
  s->threshold[word] |= value << 8 * digit;
  if (s->counts[value] == s->left) {  // all of them go
    s->done = 1;
    s->threshold[word] |= (std::uint64_t{1} << 8 * digit) - 1;
    for (int w = word + 1; w < kWords; ++w) s->threshold[w] = ~std::uint64_t{0};
  }
  for (int v = 0; v < kValues; ++v) s->counts[v] = 0;
}

__device__ __forceinline__ bool is_chosen(const Selection& s, const Rank& rank) {
  for (int w = 0; w < kWords; ++w) {
    if (rank.word[w] != s.threshold[w]) return rank.word[w] < s.threshold[w];
  }
  return true;
}

// Into limbo, or free.
__device__ __forceinline__ std::int32_t leave(const StoreView& store, const RowPlaces& places,
                                              std::uint32_t number, const DeviceLimbo& limbo) {
  if (limbo.rows == nullptr) return free_row(store, places, number);
  RowRecord* const record = places.record_of(number);
  const std::int32_t table = take_out_row(store, record);
  record->table = table_in_limbo(table);
  const std::uint32_t at = atomicAdd(limbo.rows, 1u);
  if (at < limbo.most) limbo.rows[1 + at] = number;
  return table;
}

__global__ void depart(StoreView store, RowPlaces places, EvictWork work, DeviceLimbo limbo) {
  const Selection& s = *work.selection;
  if (store.state->num_chosen == 0) return;
  const std::int64_t lane = threadIdx.x % kWarpSize;
  for (std::int64_t i = global_thread(); i - lane < s.num_candidates; i += all_threads()) {
    std::int32_t table = 0;
    bool goes = i < s.num_candidates;
    if (goes) {
      const std::uint32_t number = work.candidates[i];
      goes = is_chosen(s, rank_of(store, *places.record_of(number)));
      if (goes) table = leave(store, places, number, limbo);
    }
    count_gone(store, goes, table, limbo.rows == nullptr);
  }
}

__global__ void clear_table(StoreView store, RowPlaces places, std::int64_t table,
                            std::int64_t num_rows) {
  const std::int64_t r = global_thread();
  const bool goes = r < num_rows && !is_free(store, r) &&
                    places.record_of(static_cast<std::uint32_t>(r))->table == table;
  if (goes) free_row(store, places, static_cast<std::uint32_t>(r));
  count_gone(store, goes, static_cast<std::int32_t>(table), true);
}

__global__ void free_limbo(StoreView store, DeviceLimbo limbo) {
  const std::int64_t i = global_thread();
  if (i == 0) add(&store.state->num_free, limbo.rows[0]);
  if (i < limbo.most && i < limbo.rows[0]) set_free(store, limbo.rows[1 + i]);
}

// Distinct keys that the index does not have.
__global__ void bring_back(StoreView store, RowPlaces places, DeviceLimbo limbo) {
  const std::int64_t i = global_thread();
  if (i >= limbo.most || i >= limbo.rows[0]) return;
  const std::uint32_t number = limbo.rows[1 + i];
  RowRecord* const record = places.record_of(number);
  const std::int32_t table = table_in_limbo(record->table);
  record->table = table;
  const std::uint64_t hash = hash_key(store.tables[table].hash, record->key);
  if (!enter_pair(store.index, hash, {record->key, number, table})) {
    add(&store.state->lost_keys, 1);
  }
  add(&table_state(store, table)->size, 1);
}

unsigned some_blocks(std::int64_t size) {
  const unsigned blocks = num_blocks(size, kThreads);
  return blocks < kMostBlocks ? blocks : kMostBlocks;
}

}  // namespace

std::size_t store_evict_work_bytes(std::int64_t num_rows) {
  Carve carve(nullptr);
  lay_out_evict(carve, num_rows);
  return carve.used();
}

void store_evict(const StoreView& store, std::int64_t table, std::int64_t batch,
                 std::int64_t num_rows, const DeviceLimbo& limbo, void* memory, Stream stream) {
  if (num_rows == 0) return;
  static_assert(kThreads == kValues, "a thread counts a value");
  Carve carve(memory);
  const EvictWork work = lay_out_evict(carve, num_rows);
  const RowPlaces places = places_of(store);
  const unsigned blocks = some_blocks(num_rows);
  launch(start_selection, 1, kThreads, 0, stream, work);
  launch(list_candidates, blocks, kThreads, 0, stream, store, places, table, batch, work);
  launch(plan_selection, 1, 1, 0, stream, store, table, work);
  for (int word = 0; word < kWords; ++word) {
    for (int digit = kDigitsOfWord - 1; digit >= 0; --digit) {
      launch(count_candidates, blocks, kThreads, sizeof(CountShared), stream, store, places, work,
             word, digit);
      launch(choose_digit, 1, 1, 0, stream, work, word, digit);
    }
  }
  launch(depart, blocks, kThreads, 0, stream, store, places, work, limbo);
}

void store_free_limbo(const StoreView& store, const DeviceLimbo& limbo, Stream stream) {
  launch(free_limbo, num_blocks(limbo.most + 1, kThreads), kThreads, 0, stream, store, limbo);
}

void store_bring_back(const StoreView& store, const DeviceLimbo& limbo, Stream stream) {
  if (limbo.most == 0) return;
  launch(bring_back, num_blocks(limbo.most, kThreads), kThreads, 0, stream, store, places_of(store),
         limbo);
}

void store_clear_table(const StoreView& store, std::int64_t table, std::int64_t num_rows,
                       Stream stream) {
  if (num_rows == 0) return;
  launch(clear_table, num_blocks(num_rows, kThreads), kThreads, 0, stream, store, places_of(store),
         table, num_rows);
}

}  // namespace cuda
}  // namespace nestpipe
