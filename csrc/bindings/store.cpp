// The store of embedding rows, initial values and the hash of table names.
#include "nestpipe/store.h"

#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "nestpipe/hash.h"
#include "nestpipe/init.h"

namespace nestpipe {
namespace {

using Address = std::uintptr_t;
using Unlocked = py::call_guard<py::gil_scoped_release>;
// (name, seed, init kind, first, second, quota)
using TableTuple = std::tuple<std::string, std::uint64_t, int, double, double, std::int64_t>;

KeySpan key_span(Address keys, Address tables, std::int64_t size) {
  return {as_pointer<const std::int64_t>(keys), as_pointer<const std::int32_t>(tables), size};
}

RetrievalSpan retrieval_span(Address handles, Address status, Address previous_last_used,
                             Address previous_frequency) {
  return {as_pointer<std::int64_t>(handles), as_pointer<std::uint8_t>(status),
          as_pointer<std::int64_t>(previous_last_used),
          as_pointer<std::int64_t>(previous_frequency)};
}

MetadataSpan metadata_span(Address last_used, Address frequency) {
  return {as_pointer<std::int64_t>(last_used), as_pointer<std::int64_t>(frequency)};
}

std::unique_ptr<EmbeddingStore> make_store(std::int64_t dim, std::int64_t state_floats,
                                           float state_init, std::uint64_t limit_bytes,
                                           const std::vector<TableTuple>& tables) {
  StoreConfig config{dim, state_floats, state_init, limit_bytes, {}};
  for (const auto& [name, seed, kind, first, second, quota] : tables) {
    config.tables.push_back(
        {hash_name(name), seed, {static_cast<InitKind>(kind), first, second}, quota});
  }
  return std::make_unique<EmbeddingStore>(config);
}

// Calls that search or change keys.
void bind_keys_of_store(py::class_<EmbeddingStore>& store) {
  store.def(
      "retrieve",
      [](EmbeddingStore& self, Address keys, Address tables, std::int64_t size, Address counts,
         std::int64_t batch, Address handles, Address status,
         std::pair<Address, Address> previous) {
        self.retrieve(key_span(keys, tables, size), as_pointer<const std::int64_t>(counts), batch,
                      retrieval_span(handles, status, previous.first, previous.second));
      },
      Unlocked());
  store.def(
      "undo",
      [](EmbeddingStore& self, std::int64_t size, Address handles, Address status,
         std::pair<Address, Address> previous) {
        self.undo(retrieval_span(handles, status, previous.first, previous.second), size);
      },
      Unlocked());
  store.def(
      "find",
      [](const EmbeddingStore& self, Address keys, Address tables, std::int64_t size,
         Address handles) {
        self.find(key_span(keys, tables, size), as_pointer<std::int64_t>(handles));
      },
      Unlocked());
  store.def("clear", &EmbeddingStore::clear, Unlocked());
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
  const auto as_bytes = [](const std::vector<std::int64_t>& values) {
    return py::bytearray(reinterpret_cast<const char*>(values.data()),
                         values.size() * sizeof(std::int64_t));
  };
  return py::make_tuple(as_bytes(keys), as_bytes(handles));
}

}  // namespace

void bind_store(py::module_& module) {
  py::class_<EmbeddingStore> store(module, "EmbeddingStore");
  store.def(py::init(&make_store), py::arg("dim"), py::arg("state_floats"), py::arg("state_init"),
            py::arg("limit_bytes"), py::arg("tables"));
  store.def_property_readonly("row_floats", &EmbeddingStore::row_floats);
  store.def("size", &EmbeddingStore::size, py::arg("table"), Unlocked());
  store.def("export_table", &export_table, py::arg("table"));
  store.def(
      "shard_sizes",
      [](const EmbeddingStore& self, std::int64_t table, Address sizes) {
        self.shard_sizes(table, as_pointer<std::int64_t>(sizes));
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
  store.def("memory", [](const EmbeddingStore& self) {
    const StoreMemory memory = self.memory();
    return py::make_tuple(memory.index_bytes, memory.slab_bytes, memory.metadata_bytes);
  });
  bind_keys_of_store(store);
  bind_rows_of_store(store);

  module.def("hash_name", [](const std::string& name) { return hash_name(name); });
  module.def(
      "initial_values",
      [](int kind, std::pair<double, double> parameters, std::uint64_t seed,
         std::uint64_t table_hash, Address keys, std::int64_t size, std::int64_t dim, Address out) {
        const Initializer init{static_cast<InitKind>(kind), parameters.first, parameters.second};
        for (std::int64_t j = 0; j < size; ++j) {
          initial_values(init, seed, table_hash, as_pointer<const std::int64_t>(keys)[j], dim,
                         as_pointer<float>(out) + j * dim);
        }
      },
      Unlocked());
}

}  // namespace nestpipe
