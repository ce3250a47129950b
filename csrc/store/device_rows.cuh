// Rows of a store in device memory: where they lie, and copies of their embeddings by warps.
#pragma once

#include "../cuda/row_lanes.cuh"
#include "device_index.cuh"
#include "nestpipe/cuda/device_store.h"
#include "nestpipe/initial_value.h"

namespace nestpipe {
namespace cuda {

constexpr int kRowsInFlight = 4;  // that a lane reads before it writes
constexpr std::int64_t kFloatsPerSector = 8;

inline std::int64_t record_floats(const RowShape& shape) {
  return (shape.used() + kFloatsPerSector - 1) / kFloatsPerSector * kFloatsPerSector;
}

// A load of what the kernel reads once: past the first cache, and as one of global memory, which
// the compiler cannot know of an address that it finds in memory.
template <typename Unit>
__device__ __forceinline__ Unit load_once(const Unit* address) {
#if defined(__CUDA_ARCH__)
  return __ldcg(address);
#else
  return *address;
#endif
}

// Where rows lie, worked out once by the host.
struct RowPlaces {
  float* const* slabs;
  int slab_shift;
  std::uint32_t slab_mask;
  std::int64_t stride, record;  // floats

  __device__ __forceinline__ float* row(std::uint32_t number) const {
    return slabs[number >> slab_shift] + (number & slab_mask) * stride;
  }
  __device__ __forceinline__ RowRecord* record_of(std::uint32_t number) const {
    return reinterpret_cast<RowRecord*>(row(number) + record);
  }
};

inline RowPlaces places_of(const StoreView& store) {
  int shift = 0;
  while ((std::int64_t{1} << shift) < store.rows_per_slab) ++shift;
  const std::int64_t record = record_floats(store.shape);
  return {store.slabs, shift, static_cast<std::uint32_t>(store.rows_per_slab - 1),
          record + kFloatsPerSector, record};
}

__device__ __forceinline__ DeviceTableState* table_state(const StoreView& store,
                                                         std::int64_t table) {
  return reinterpret_cast<DeviceTableState*>(store.state + 1) + table;
}

__device__ __forceinline__ void add(std::int64_t* counter, std::int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ bool is_free(const StoreView& store, std::int64_t number) {
  return (store.free_rows[number / 32] >> number % 32 & 1u) != 0;
}

// False, and noted: there is no such table.
__device__ __forceinline__ bool has_table(const StoreView& store, std::int32_t table) {
  if (table >= 0 && table < store.num_tables) return true;
  add(&store.state->bad_tables, 1);
  return false;
}

// The number of a row; kNoRowNumber for -1 and, noted, for handles that were never given out.
__device__ __forceinline__ std::uint32_t row_of_handle(const StoreView& store,
                                                       std::int64_t handle) {
  if (handle >= 0 && handle < store.state->num_rows) return static_cast<std::uint32_t>(handle);
  if (handle != -1) add(&store.state->bad_handles, 1);
  return kNoRowNumber;
}

__device__ __forceinline__ std::uint32_t find_row(const StoreView& store, std::int64_t key,
                                                  std::int32_t table) {
  return find_pair(store.index, hash_key(store.tables[table].hash, key), key, table).row;
}

// The table of a row in limbo, whose record has the complement: it belongs to no table's rows.
__device__ __forceinline__ std::int32_t table_in_limbo(std::int32_t table) { return ~table; }

__device__ __forceinline__ void set_free(const StoreView& store, std::uint32_t number) {
  change_word(store.free_rows + number / 32,
              [number](std::uint32_t word) { return word | 1u << number % 32; });
}

// Takes a row's key out of the index, while nobody enters; its table. For distinct rows.
__device__ __forceinline__ std::int32_t take_out_row(const StoreView& store, RowRecord* record) {
  record->mark = kUnmarked;
  const std::int32_t table = record->table;
  const std::int64_t key = record->key;
  take_out_pair(store.index, hash_key(store.tables[table].hash, key), key, table);
  return table;
}

// The same, and frees the number; counts nothing.
__device__ __forceinline__ std::int32_t free_row(const StoreView& store, const RowPlaces& places,
                                                 std::uint32_t number) {
  const std::int32_t table = take_out_row(store, places.record_of(number));
  set_free(store, number);
  return table;
}

// Counts the rows that lanes of a warp have taken out; free: their numbers, too. The whole warp
// calls it.
__device__ __forceinline__ void count_gone(const StoreView& store, bool gone, std::int32_t table,
                                           bool free) {
  const unsigned active = __ballot_sync(kAllLanes, gone);
  if (!gone) return;
  const unsigned same = __match_any_sync(active, table);
  if ((same & lanes_before(threadIdx.x % kWarpSize)) != 0) return;
  add(&table_state(store, table)->size, -std::int64_t{__popc(same)});
  if (free) add(&store.state->num_free, __popc(same));
}

// How lanes move embeddings: one Unit of a row each, written as float32.
struct MoveFloats {
  using Unit = float;
  static __device__ __forceinline__ std::int64_t units(const RowShape& shape) { return shape.dim; }
  static __device__ __forceinline__ void store(const RowShape&, float* row, std::int64_t unit,
                                               float value) {
    row[unit] = value;
  }
};
struct MoveVectors {
  using Unit = float4;
  static __device__ __forceinline__ std::int64_t units(const RowShape& shape) {
    return shape.dim / 4;
  }
  static __device__ __forceinline__ void store(const RowShape&, float* row, std::int64_t unit,
                                               const float4& value) {
    reinterpret_cast<float4*>(row)[unit] = value;
  }
};
__device__ __forceinline__ float widened(const RowShape& shape, std::uint32_t half) {
  const auto bits = static_cast<std::uint16_t>(half);
  return shape.data_type == DataType::kBFloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}
struct MoveHalves {  // two at a time
  using Unit = std::uint32_t;
  static __device__ __forceinline__ std::int64_t units(const RowShape& shape) {
    return shape.embedding_words;
  }
  static __device__ __forceinline__ void store(const RowShape& shape, float* row, std::int64_t unit,
                                               std::uint32_t word) {
    row[2 * unit] = widened(shape, word & 0xFFFFu);
    if (2 * unit + 1 < shape.dim) row[2 * unit + 1] = widened(shape, word >> 16);
  }
};
struct MoveHalfVectors {  // eight at a time
  using Unit = uint4;
  static __device__ __forceinline__ std::int64_t units(const RowShape& shape) {
    return shape.dim / 8;
  }
  static __device__ __forceinline__ void store(const RowShape& shape, float* row, std::int64_t unit,
                                               const uint4& words) {
    float4* const to = reinterpret_cast<float4*>(row) + 2 * unit;
    to[0] = make_float4(widened(shape, words.x & 0xFFFFu), widened(shape, words.x >> 16),
                        widened(shape, words.y & 0xFFFFu), widened(shape, words.y >> 16));
    to[1] = make_float4(widened(shape, words.z & 0xFFFFu), widened(shape, words.z >> 16),
                        widened(shape, words.w & 0xFFFFu), widened(shape, words.w >> 16));
  }
};

// Embeddings of the warp's rows, `number` that of each lane, to rows first + lane of out; lanes
// with kNoRowNumber have none. `lanes` of a row: a power of two up to 32. The whole warp calls it.
template <typename Move>
__device__ __forceinline__ void copy_embeddings(const StoreView& store, const RowPlaces& places,
                                                int lanes, std::uint32_t number, std::int64_t first,
                                                float* out) {
  using Unit = typename Move::Unit;
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  const int at_once = kWarpSize / lanes, mine = lane / lanes;
  const std::int64_t units = Move::units(store.shape);
  for (int base = 0; base < kWarpSize; base += at_once * kRowsInFlight) {
    const Unit* from[kRowsInFlight];
    for (int k = 0; k < kRowsInFlight; ++k) {
      const int row = base + k * at_once + mine;
      const std::uint32_t other = __shfl_sync(kAllLanes, number, row % kWarpSize);
      const bool there = row < kWarpSize && other != kNoRowNumber;
      from[k] = there ? reinterpret_cast<const Unit*>(places.row(other)) : nullptr;
    }
    for (std::int64_t unit = lane % lanes; unit < units; unit += lanes) {
      Unit values[kRowsInFlight] = {};
      for (int k = 0; k < kRowsInFlight; ++k) {
        if (from[k] != nullptr) values[k] = load_once(from[k] + unit);
      }
      for (int k = 0; k < kRowsInFlight; ++k) {
        float* const to = out + (first + base + k * at_once + mine) * store.shape.dim;
        if (from[k] != nullptr) Move::store(store.shape, to, unit, values[k]);
      }
    }
  }
}

// Calls launch_with(Move{}, lanes of a row) for the widest moves that the shape and `out` allow.
template <typename LaunchWith>
void with_moves(const RowShape& shape, const float* out, const LaunchWith& launch_with) {
  const auto lanes_for = [](std::int64_t units) {
    int lanes = 1;
    while (lanes < kWarpSize && lanes < units) lanes *= 2;
    return lanes;
  };
  const std::int64_t dim = shape.dim;
  const bool wide = aligned_16(out, dim);
  if (shape.data_type == DataType::kFloat32) {
    if (wide) return launch_with(MoveVectors{}, lanes_for(dim / 4));
    return launch_with(MoveFloats{}, lanes_for(dim));
  }
  if (wide && dim % 8 == 0) return launch_with(MoveHalfVectors{}, lanes_for(dim / 8));
  launch_with(MoveHalves{}, lanes_for(shape.embedding_words));
}

// A word of the row that a key starts with, or, with `absent`, reads without a row.
__device__ __forceinline__ float initial_word(const StoreView& store, const DeviceTable& table,
                                              bool absent, std::int64_t key, std::int64_t word) {
  const RowShape& shape = store.shape;
  if (word >= shape.embedding_words) {
    return word < shape.embedding_words + shape.state_floats ? shape.state_init : 0.0f;
  }
  const auto kind = static_cast<InitKind>(absent ? table.absent_kind : table.init_kind);
  const double* const parameters = absent ? table.absent : table.init;
  const std::uint64_t stream = value_stream(table.seed, table.hash, key);
  if (shape.data_type == DataType::kFloat32) return initial_value(kind, parameters, stream, word);
  std::uint32_t bits = 0;
  for (int half = 0; half < 2; ++half) {
    const std::int64_t element = 2 * word + half;
    if (element >= shape.dim) break;
    const float value = initial_value(kind, parameters, stream, element);
    const std::uint32_t rounded =
        shape.data_type == DataType::kBFloat16 ? float_to_bfloat16(value) : float_to_float16(value);
    bits |= rounded << 16 * half;
  }
  return bits_float(bits);
}

}  // namespace cuda
}  // namespace nestpipe
