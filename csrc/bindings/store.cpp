// The store of embedding rows, initial values and the hash of table names.
#include "nestpipe/store.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "nestpipe/hash.h"
#include "nestpipe/init.h"
#include "pool_arguments.h"
#include "update_arguments.h"

namespace nestpipe {
namespace {

using Address = std::uintptr_t;
using Unlocked = py::call_guard<py::gil_scoped_release>;
// (kind, parameters)
using InitTuple = std::pair<int, InitParameters>;
// (kind, count, filter cells, probability, seed)
using AdmissionTuple = std::tuple<int, std::int64_t, std::int64_t, double, std::uint64_t>;
// (kind, rows to keep, steps, interval)
using EvictionTuple = std::tuple<int, std::int64_t, std::int64_t, std::int64_t>;
// (name, seed, initial values, quota, values of absent keys, admission, eviction)
using TableTuple = std::tuple<std::string, std::uint64_t, InitTuple, std::int64_t,
                              std::optional<InitTuple>, AdmissionTuple, EvictionTuple>;
// (directory, bytes in memory)
using FileTuple = std::optional<std::pair<std::string, std::uint64_t>>;
using CountersTuple =
    std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

// (offset in the row, bytes, address)
using ColumnTuples = std::vector<std::tuple<std::int64_t, std::int64_t, Address>>;

Initializer to_initializer(const InitTuple& init) {
  return {static_cast<InitKind>(init.first), init.second};
}

KeySpan key_span(Address keys, Address tables, std::int64_t size) {
  return {as_pointer<const std::int64_t>(keys), as_pointer<const std::int32_t>(tables), size};
}

RetrievalSpan retrieval_span(const std::pair<Address, Address>& out, Address embeddings = 0) {
  return {as_pointer<std::int64_t>(out.first), as_pointer<std::uint8_t>(out.second),
          as_pointer<float>(embeddings)};
}

MetadataSpan metadata_span(Address last_used, Address frequency) {
  return {as_pointer<std::int64_t>(last_used), as_pointer<std::int64_t>(frequency)};
}

std::vector<RowColumn> row_columns(const ColumnTuples& columns) {
  std::vector<RowColumn> parts;
  for (const auto& [offset, bytes, data] : columns) {
    parts.push_back({offset, bytes, as_pointer<char>(data)});
  }
  return parts;
}

std::unique_ptr<EmbeddingStore> make_store(std::int64_t dim, int data_type,
                                           std::int64_t state_floats, float state_init,
                                           std::uint64_t limit_bytes,
                                           const std::vector<TableTuple>& tables,
                                           const FileTuple& file) {
  StoreConfig config;
  config.dim = dim;
  config.data_type = static_cast<DataType>(data_type);
  config.state_floats = state_floats;
  config.state_init = state_init;
  config.limit_bytes = limit_bytes;
  if (file.has_value()) std::tie(config.file_directory, config.file_limit_bytes) = *file;
  for (const auto& [name, seed, init, quota, absent, admission, eviction] : tables) {
    TableConfig table{hash_name(name), seed, to_initializer(init), quota, {}, false, {}, {}};
    if (absent.has_value()) {
      table.absent = to_initializer(*absent);
      table.has_absent = true;
    }
    const auto& [admission_kind, count, filter_cells, probability, admission_seed] = admission;
    table.admission = {static_cast<AdmissionKind>(admission_kind), count, filter_cells, probability,
                       admission_seed};
    const auto& [eviction_kind, keep, steps, interval] = eviction;
    table.eviction = {static_cast<EvictionKind>(eviction_kind), keep, steps, interval};
    config.tables.push_back(table);
  }
  return std::make_unique<EmbeddingStore>(config);
}

template <typename T>
py::bytearray as_bytes(const std::vector<T>& values) {
  return py::bytearray(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename T>
std::vector<T> as_vector(Address from, std::int64_t size) {
  const auto* const data = as_pointer<const T>(from);
  return std::vector<T>(data, data + size);
}

// `function` gets (table, keys, last_used, frequency, batch, address of the scores): byte strings
// of int64, and where to write as many float64.
ScoreFunction score_function(const py::object& function) {
  if (function.is_none()) return {};
  return [&function](const ScoreArguments& rows, double* scores) {
    const py::gil_scoped_acquire locked;
    function(rows.table, as_bytes(rows.keys), as_bytes(rows.last_used), as_bytes(rows.frequency),
             rows.batch, reinterpret_cast<Address>(scores));
  };
}

void retrieve(EmbeddingStore& self, Address keys, Address tables, std::int64_t size, Address counts,
              std::int64_t batch, const py::object& score, const std::pair<Address, Address>& out,
              Address embeddings, RetrievalJournal* journal) {
  const ScoreFunction function = score_function(score);
  const py::gil_scoped_release unlocked;
  self.retrieve(key_span(keys, tables, size), as_pointer<const std::int64_t>(counts), batch,
                function, retrieval_span(out, embeddings), journal);
}

// Calls that search or change keys.
void bind_keys_of_store(py::class_<EmbeddingStore>& store) {
  store.def("retrieve", &retrieve);
  store.def(
      "undo",
      [](EmbeddingStore& self, std::int64_t size, const std::pair<Address, Address>& retrieval,
         RetrievalJournal& journal) { self.undo(retrieval_span(retrieval), size, &journal); },
      Unlocked());
  store.def("evicted", [](const EmbeddingStore& self, const RetrievalJournal& journal) {
    EvictedKeys gone;
    {
      const py::gil_scoped_release unlocked;
      gone = self.evicted(journal);
    }
    return py::make_tuple(as_bytes(gone.keys), as_bytes(gone.tables));
  });
  store.def(
      "load_rows",
      [](EmbeddingStore& self, Address keys, Address tables, std::int64_t size, Address rows,
         Address last_used, Address frequency) {
        return self.load_rows(key_span(keys, tables, size), as_pointer<const float>(rows),
                              metadata_span(last_used, frequency));
      },
      Unlocked());
  store.def(
      "load_columns",
      [](EmbeddingStore& self, std::int64_t table, Address keys, std::int64_t size,
         const ColumnTuples& columns, Address last_used, Address frequency) {
        return self.load_columns(table, as_pointer<const std::int64_t>(keys), size,
                                 row_columns(columns), metadata_span(last_used, frequency));
      },
      Unlocked());
  store.def("reserve_keys", &EmbeddingStore::reserve_keys, Unlocked());
  store.def(
      "find",
      [](const EmbeddingStore& self, Address keys, Address tables, std::int64_t size,
         Address handles) {
        self.find(key_span(keys, tables, size), as_pointer<std::int64_t>(handles));
      },
      Unlocked());
  store.def(
      "retrieve_occurrences",
      [](EmbeddingStore& self, Address keys, Address tables, std::int64_t size, Address valid,
         std::int64_t batch, const std::tuple<Address, Address, Address, Address>& out,
         RetrievalJournal& journal) {
        const OccurrenceSpan span = {
            as_pointer<std::int32_t>(std::get<0>(out)), as_pointer<std::int64_t>(std::get<1>(out)),
            as_pointer<std::int64_t>(std::get<2>(out)), as_pointer<std::int32_t>(std::get<3>(out))};
        return self.retrieve_occurrences(key_span(keys, tables, size),
                                         as_pointer<const std::uint8_t>(valid), batch, span,
                                         &journal);
      },
      Unlocked());
  store.def(
      "warm",
      [](const EmbeddingStore& self, Address keys, Address tables, std::int64_t size) {
        self.warm(key_span(keys, tables, size));
      },
      Unlocked());
  store.def("clear", &EmbeddingStore::clear, Unlocked());
  store.def("clear_table", &EmbeddingStore::clear_table, Unlocked());
  store.def(
      "erase",
      [](EmbeddingStore& self, Address keys, Address tables, std::int64_t size, Address status) {
        self.erase(key_span(keys, tables, size), as_pointer<std::uint8_t>(status));
      },
      Unlocked());
}

// Calls that reach rows and records by handle.
void bind_rows_of_store(py::class_<EmbeddingStore>& store) {
  store.def(
      "gather",
      [](const EmbeddingStore& self, Address handles, Address keys, Address tables,
         std::int64_t size, Address index, std::pair<Address, std::int64_t> out) {
        self.gather(as_pointer<const std::int64_t>(handles), key_span(keys, tables, size),
                    as_pointer<const std::int64_t>(index), as_pointer<float>(out.first),
                    out.second);
      },
      Unlocked());
  store.def(
      "write_back",
      [](EmbeddingStore& self, Address handles, std::int64_t size, Address rows) {
        self.write_back(as_pointer<const std::int64_t>(handles), size,
                        as_pointer<const float>(rows));
      },
      Unlocked());
  store.def(
      "read_embeddings",
      [](const EmbeddingStore& self, Address handles, Address keys, Address tables,
         std::int64_t size, Address out) {
        self.read_embeddings(as_pointer<const std::int64_t>(handles), key_span(keys, tables, size),
                             as_pointer<float>(out));
      },
      Unlocked());
  store.def(
      "write_embeddings",
      [](EmbeddingStore& self, Address handles, std::int64_t size, Address values) {
        self.write_embeddings(as_pointer<const std::int64_t>(handles), size,
                              as_pointer<const float>(values));
      },
      Unlocked());
  store.def_property_readonly("pools_in_place", &EmbeddingStore::pools_in_place);
  store.def("sequence", &EmbeddingStore::sequence, Unlocked());
  store.def(
      "pool",
      [](const EmbeddingStore& self, Address handles, Address keys, Address tables,
         std::int64_t size, const BagsTuple& bags, const SegmentBags& segment_bags,
         const SegmentModes& segment_modes, const MatrixList& outs) {
        self.pool(as_pointer<const std::int64_t>(handles), key_span(keys, tables, size),
                  to_bags(bags, segment_bags, segment_modes),
                  to_matrices<SegmentOutput, float>(outs));
      },
      Unlocked());
  store.def(
      "pool_keys",
      [](const EmbeddingStore& self, Address keys, Address tables, std::int64_t size, Address valid,
         const BagsTuple& bags, const SegmentBags& segment_bags, const SegmentModes& segment_modes,
         const MatrixList& outs) {
        return self.pool_keys(key_span(keys, tables, size), as_pointer<const std::uint8_t>(valid),
                              to_bags(bags, segment_bags, segment_modes),
                              to_matrices<SegmentOutput, float>(outs));
      },
      Unlocked());
  store.def(
      "update_pooled",
      [](EmbeddingStore& self, Address handles, std::int64_t size, const BagsTuple& bags,
         const SegmentBags& segment_bags, const SegmentModes& segment_modes,
         const MatrixList& grads, const PerRowTuple& per_row, const SettingsTuple& settings) {
        UpdateArguments a;
        set_per_row(per_row, &a);
        self.update_pooled(as_pointer<const std::int64_t>(handles), size,
                           to_bags(bags, segment_bags, segment_modes),
                           to_matrices<SegmentGradient, const float>(grads), a,
                           to_settings(settings));
      },
      Unlocked());
  store.def(
      "read_metadata",
      [](const EmbeddingStore& self, Address handles, std::int64_t size, Address last_used,
         Address frequency) {
        self.read_metadata(as_pointer<const std::int64_t>(handles), size,
                           metadata_span(last_used, frequency));
      },
      Unlocked());
  store.def(
      "write_metadata",
      [](EmbeddingStore& self, Address handles, std::int64_t size, Address last_used,
         Address frequency) {
        self.write_metadata(as_pointer<const std::int64_t>(handles), size,
                            metadata_span(last_used, frequency));
      },
      Unlocked());
}

// Two byte strings of int64: keys and handles.
py::tuple export_table(const EmbeddingStore& self, std::int64_t table) {
  std::vector<std::int64_t> keys;
  std::vector<std::int64_t> handles;
  {
    const py::gil_scoped_release unlocked;
    self.export_table(table, &keys, &handles);
  }
  return py::make_tuple(as_bytes(keys), as_bytes(handles));
}

// What is known about keys beside their rows.
void bind_counts_of_store(py::class_<EmbeddingStore>& store) {
  store.def("last_batch", &EmbeddingStore::last_batch, Unlocked());
  store.def(
      "counters",
      [](const EmbeddingStore& self, std::int64_t table) {
        const TableCounters counters = self.counters(table);
        return CountersTuple(counters.inserted, counters.evicted, counters.expired,
                             counters.refused, counters.not_admitted);
      },
      Unlocked());
  store.def(
      "set_counters",
      [](EmbeddingStore& self, std::int64_t table, const CountersTuple& counters) {
        const auto& [inserted, evicted, expired, refused, not_admitted] = counters;
        self.set_counters(table, {inserted, evicted, expired, refused, not_admitted});
      },
      Unlocked());
  store.def(
      "admission_state", [](const EmbeddingStore& self, std::int64_t table, int first, int end) {
        CountsState state;
        {
          const py::gil_scoped_release unlocked;
          state = self.admission_state(table, first, end);
        }
        return py::make_tuple(as_bytes(state.keys), as_bytes(state.counts), as_bytes(state.cells));
      });
  store.def(
      "load_admission_state",
      [](EmbeddingStore& self, std::int64_t table, std::int64_t size, Address keys, Address counts,
         std::pair<Address, std::int64_t> cells) {
        CountsState state;
        state.keys = as_vector<std::int64_t>(keys, size);
        if (counts != 0) state.counts = as_vector<std::int64_t>(counts, size);
        state.cells = as_vector<std::uint8_t>(cells.first, cells.second);
        self.load_admission_state(table, state);
      },
      Unlocked());
  store.def("filter_layout", [](const EmbeddingStore& self, std::int64_t table) {
    return std::make_pair(self.filter_blocks(table), self.filter_cells_per_block(table));
  });
}

}  // namespace

void bind_store(py::module_& module) {
  py::class_<RetrievalJournal>(module, "RetrievalJournal").def(py::init<>());
  py::class_<EmbeddingStore> store(module, "EmbeddingStore");
  store.def(py::init(&make_store), py::arg("dim"), py::arg("data_type"), py::arg("state_floats"),
            py::arg("state_init"), py::arg("limit_bytes"), py::arg("tables"), py::arg("file"));
  store.def_property_readonly("row_floats", &EmbeddingStore::row_floats);
  store.def_property_readonly("embedding_words", &EmbeddingStore::embedding_words);
  store.def("size", &EmbeddingStore::size, py::arg("table"), Unlocked());
  store.def("export_table", &export_table, py::arg("table"));
  store.def(
      "shard_sizes",
      [](const EmbeddingStore& self, std::int64_t table, Address sizes) {
        self.shard_sizes(table, as_pointer<std::int64_t>(sizes));
      },
      Unlocked());
  store.def(
      "copy_columns",
      [](const EmbeddingStore& self, Address handles, std::int64_t size,
         const ColumnTuples& columns) {
        self.copy_columns(as_pointer<const std::int64_t>(handles), size, row_columns(columns));
      },
      Unlocked());
  store.def(
      "export_shards",
      [](const EmbeddingStore& self, std::int64_t table, int first, int end, std::int64_t capacity,
         std::pair<Address, Address> out) {
        return self.export_shards(table, first, end, capacity, as_pointer<std::int64_t>(out.first),
                                  as_pointer<std::int64_t>(out.second));
      },
      Unlocked());
  store.def(
      "memory",
      [](const EmbeddingStore& self) {
        const StoreMemory memory = self.memory();
        return std::make_tuple(memory.index_bytes, memory.slab_bytes, memory.metadata_bytes,
                               memory.admission_bytes, memory.file_bytes, memory.num_keys,
                               memory.untouched_bytes, memory.row_bytes);
      },
      Unlocked());
  store.def(
      "file_counters",
      [](const EmbeddingStore& self) {
        const RowFileCounters counters = self.file_counters();
        return std::make_tuple(counters.file_bytes, counters.resident_pages, counters.limit_pages,
                               counters.page_bytes, counters.read_pages, counters.written_pages,
                               counters.dropped_pages);
      },
      Unlocked());
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const FileError& error) {
      // OSError's own constructor makes PermissionError and others of it.
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code(), error.what()).ptr());
    }
  });
  bind_keys_of_store(store);
  bind_rows_of_store(store);
  bind_counts_of_store(store);

  module.def("row_floats", &floats_per_row);
  module.def("hash_name", [](const std::string& name) { return hash_name(name); });
  module.def(
      "initial_values",
      [](const InitTuple& init, std::uint64_t seed, std::uint64_t table_hash, Address keys,
         std::int64_t size, std::int64_t dim, Address out) {
        const Initializer initializer = to_initializer(init);
        for (std::int64_t j = 0; j < size; ++j) {
          initial_values(initializer, seed, table_hash, as_pointer<const std::int64_t>(keys)[j],
                         dim, as_pointer<float>(out) + j * dim);
        }
      },
      Unlocked());
}

}  // namespace nestpipe
