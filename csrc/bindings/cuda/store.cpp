// The row store in device memory for Python. Python owns all memory; a store is what it describes.
//
// All functions take lists of words, addresses among them, in the order that comments name: with
// one signature the compiler makes one binding.
#include <vector>

#include "bindings.h"
#include "nestpipe/cuda/device_store.h"

namespace nestpipe {
namespace cuda {
namespace {

using Words = std::vector<Count>;
using Lists = std::vector<Words>;
using Call = void (*)(const Lists&, const Place&);
using CountBytes = std::size_t (*)(const Lists&);

template <typename T>
T* pointer_at(const Words& words, std::size_t i) {
  return as_pointer<T>(static_cast<Address>(words.at(i)));
}

// (tags, entries, num_buckets)
DeviceIndex index_of(const Words& w) {
  return {pointer_at<std::uint32_t>(w, 0), pointer_at<IndexEntry>(w, 1), w.at(2)};
}

// (tags, entries, num_buckets, slabs, rows_per_slab, data_type, bits of state_init, dim,
// embedding_words, state_floats, row_floats, tables, num_tables, free_rows, state)
StoreView view_of(const Words& w) {
  const RowShape shape = {static_cast<DataType>(w.at(5)),
                          bits_float(static_cast<std::uint32_t>(w.at(6))),
                          w.at(7),
                          w.at(8),
                          w.at(9),
                          w.at(10)};
  return {index_of(w),
          pointer_at<float* const>(w, 3),
          w.at(4),
          shape,
          pointer_at<const DeviceTable>(w, 11),
          w.at(12),
          pointer_at<std::uint32_t>(w, 13),
          pointer_at<DeviceState>(w, 14)};
}

// (keys, tables, size)
DeviceKeys keys_of(const Words& w) {
  return {pointer_at<const std::int64_t>(w, 0), pointer_at<const std::int32_t>(w, 1), w.at(2)};
}

// (handles, status, embeddings)
DeviceAnswer answer_of(const Words& w) {
  return {pointer_at<std::int64_t>(w, 0), pointer_at<std::uint8_t>(w, 1), pointer_at<float>(w, 2)};
}

// (rows or null, most), from word i on
DeviceLimbo limbo_of(const Words& w, std::size_t i = 0) {
  return {pointer_at<std::uint32_t>(w, i), w.at(i + 1)};
}

// (num_missing, num_new, num_rows, reuses, limbo), (tables that evict), (tables that may refuse)
InsertPlan plan_of(const Words& w, const Words& evicts, const Words& refuses) {
  return {w.at(0),        w.at(1),
          w.at(2),        w.at(3) != 0,
          evicts.data(),  static_cast<Count>(evicts.size()),
          refuses.data(), static_cast<Count>(refuses.size()),
          limbo_of(w, 4)};
}

// view, keys, answer
void find(const Lists& a, const Place& place) {
  at(place, [&](Stream stream) {
    store_find(view_of(a.at(0)), keys_of(a.at(1)), answer_of(a.at(2)), stream);
  });
}

// view, keys, (handles, work)
void search_missing(const Lists& a, const Place& place) {
  at(place, [&](Stream stream) {
    store_search_missing(view_of(a.at(0)), keys_of(a.at(1)), pointer_at<std::int64_t>(a.at(2), 0),
                         pointer_at<void>(a.at(2), 1), stream);
  });
}

// view, keys, (counts, batch), three of the plan, answer, (work of the search, work)
void insert_missing(const Lists& a, const Place& place) {
  const UseOfKeys use = {pointer_at<const std::int64_t>(a.at(2), 0), a.at(2).at(1)};
  at(place, [&](Stream stream) {
    store_insert_missing(view_of(a.at(0)), keys_of(a.at(1)), use,
                         plan_of(a.at(3), a.at(4), a.at(5)), answer_of(a.at(6)),
                         pointer_at<void>(a.at(7), 0), pointer_at<void>(a.at(7), 1), stream);
  });
}

// view, keys, (status, work)
void erase(const Lists& a, const Place& place) {
  at(place, [&](Stream stream) {
    store_erase(view_of(a.at(0)), keys_of(a.at(1)), pointer_at<std::uint8_t>(a.at(2), 0),
                pointer_at<void>(a.at(2), 1), stream);
  });
}

// view, (table, num_rows)
void clear_table(const Lists& a, const Place& place) {
  at(place, [&](Stream stream) {
    store_clear_table(view_of(a.at(0)), a.at(1).at(0), a.at(1).at(1), stream);
  });
}

// view, limbo
void free_limbo(const Lists& a, const Place& place) {
  at(place, [&](Stream stream) { store_free_limbo(view_of(a.at(0)), limbo_of(a.at(1)), stream); });
}

// view, limbo
void bring_back(const Lists& a, const Place& place) {
  at(place, [&](Stream stream) { store_bring_back(view_of(a.at(0)), limbo_of(a.at(1)), stream); });
}

// view, limbo, (keys, tables)
void limbo_keys(const Lists& a, const Place& place) {
  at(place, [&](Stream stream) {
    store_limbo_keys(view_of(a.at(0)), limbo_of(a.at(1)), pointer_at<std::int64_t>(a.at(2), 0),
                     pointer_at<std::int64_t>(a.at(2), 1), stream);
  });
}

// view, index
void rehash(const Lists& a, const Place& place) {
  at(place, [&](Stream stream) { store_rehash(view_of(a.at(0)), index_of(a.at(1)), stream); });
}

// view, (table, num_rows), (keys, handles, work)
void list_table(const Lists& a, const Place& place) {
  at(place, [&](Stream stream) {
    store_list_table(view_of(a.at(0)), a.at(1).at(0), a.at(1).at(1),
                     pointer_at<std::int64_t>(a.at(2), 0), pointer_at<std::int64_t>(a.at(2), 1),
                     pointer_at<void>(a.at(2), 2), stream);
  });
}

// view, (kind, handles, size), keys (of the first two kinds), (data, index, num_out) or the two
// arrays of metadata. Kinds: 0 read_rows, 1 read_embeddings, 2 write_rows, 3 write_embeddings,
// 4 read_metadata, 5 write_metadata.
void rows(const Lists& a, const Place& place) {
  const StoreView store = view_of(a.at(0));
  const Count kind = a.at(1).at(0);
  const DeviceHandles handles = {pointer_at<const std::int64_t>(a.at(1), 1), a.at(1).at(2)};
  const DeviceKeys keys = keys_of(a.at(2));
  float* const values = pointer_at<float>(a.at(3), 0);
  std::int64_t* const first = pointer_at<std::int64_t>(a.at(3), 0);
  std::int64_t* const second = pointer_at<std::int64_t>(a.at(3), 1);
  at(place, [&](Stream stream) {
    if (kind == 0) store_read_rows(store, handles, keys, second, values, a.at(3).at(2), stream);
    if (kind == 1) store_read_embeddings(store, handles, keys, values, stream);
    if (kind == 2) store_write_rows(store, handles, values, stream);
    if (kind == 3) store_write_embeddings(store, handles, values, stream);
    if (kind == 4) store_read_metadata(store, handles, first, second, stream);
    if (kind == 5) store_write_metadata(store, handles, first, second, stream);
  });
}

// (size)
std::size_t missing_bytes(const Lists& a) { return store_missing_work_bytes(a.at(0).at(0)); }
// view, three of the plan
std::size_t insert_bytes(const Lists& a) {
  return store_insert_work_bytes(view_of(a.at(0)), plan_of(a.at(1), a.at(2), a.at(3)));
}
// (num_rows)
std::size_t list_bytes(const Lists& a) { return store_list_work_bytes(a.at(0).at(0)); }

}  // namespace

void bind_cuda_store(py::module_& module) {
  const std::pair<const char*, Call> calls[] = {{"store_find", &find},
                                                {"store_search_missing", &search_missing},
                                                {"store_insert_missing", &insert_missing},
                                                {"store_erase", &erase},
                                                {"store_clear_table", &clear_table},
                                                {"store_free_limbo", &free_limbo},
                                                {"store_bring_back", &bring_back},
                                                {"store_limbo_keys", &limbo_keys},
                                                {"store_rehash", &rehash},
                                                {"store_list_table", &list_table},
                                                {"store_rows", &rows}};
  for (const auto& [name, call] : calls) {
    module.def(name, call, py::call_guard<py::gil_scoped_release>());
  }
  const std::pair<const char*, CountBytes> sizes[] = {{"store_missing_work_bytes", &missing_bytes},
                                                      {"store_insert_work_bytes", &insert_bytes},
                                                      {"store_list_work_bytes", &list_bytes}};
  for (const auto& [name, size] : sizes) module.def(name, size);
}

}  // namespace cuda
}  // namespace nestpipe
