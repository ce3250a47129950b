// Operations on keys.
#include "bindings.h"
#include "nestpipe/bucketize.h"
#include "nestpipe/cluster.h"
#include "nestpipe/dedup.h"
#include "nestpipe/intersect.h"
#include "nestpipe/owners.h"

namespace nestpipe {
namespace {

using Address = std::uintptr_t;
using Count = std::int64_t;

KeyList key_list(Address keys, Address tables, Count size) {
  return {as_pointer<const std::int64_t>(keys), as_pointer<const std::int32_t>(tables), size};
}

}  // namespace

void bind_keys(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Dedup>(module, "Dedup")
      // Only the work itself goes on without the interpreter's lock: it guards pybind11's list of
      // objects, too.
      .def(py::init([](Address keys, Address tables, Count size) {
        const py::gil_scoped_release release;
        return std::make_unique<Dedup>(key_list(keys, tables, size));
      }))
      .def("size", &Dedup::size)
      .def(
          "write",
          [](Dedup& self, Address unique_index, Address inverse, Address counts) {
            self.write(as_pointer<std::int64_t>(unique_index), as_pointer<std::int32_t>(inverse),
                       as_pointer<std::int64_t>(counts));
          },
          NoGil());
  module.def(
      "intersect",
      [](Address keys_a, Address tables_a, Count size_a, Address keys_b, Address tables_b,
         Count size_b, Address index_a, Address index_b) {
        return intersect(key_list(keys_a, tables_a, size_a), key_list(keys_b, tables_b, size_b),
                         as_pointer<std::int64_t>(index_a), as_pointer<std::int64_t>(index_b));
      },
      NoGil());
  module.def(
      "owners",
      [](Address keys, Address tables, Count size, Address table_hashes, Count num_tables,
         Address slice_owner, Address out) {
        return owners(key_list(keys, tables, size), as_pointer<const std::int64_t>(table_hashes),
                      num_tables, as_pointer<const std::int32_t>(slice_owner),
                      as_pointer<std::int32_t>(out));
      },
      NoGil());
  module.def(
      "bucketize",
      [](Address buckets, Count size, Count num_buckets, Address order, Address counts) {
        return bucketize(as_pointer<const std::int32_t>(buckets), size, num_buckets,
                         as_pointer<std::int64_t>(order), as_pointer<std::int64_t>(counts));
      },
      NoGil());
  module.def(
      "cluster",
      [](Address sample_offsets, Address ids, Count num_samples, Count num_ids, Count num_parts,
         int objective, std::uint64_t seed, Address order) {
        cluster({as_pointer<const std::int64_t>(sample_offsets),
                 as_pointer<const std::int32_t>(ids), num_samples, num_ids, num_parts},
                static_cast<ClusterObjective>(objective), seed, as_pointer<std::int64_t>(order));
      },
      NoGil());
}

}  // namespace nestpipe
