// Operations on keys in device memory for Python.
#include "bindings.h"
#include "nestpipe/cuda/bucketize.h"
#include "nestpipe/cuda/dedup.h"
#include "nestpipe/cuda/intersect.h"

namespace nestpipe {
namespace cuda {

namespace {

KeyList to_list(const std::tuple<Address, Address, Count>& given) {
  return {as_pointer<const std::int64_t>(std::get<0>(given)),
          as_pointer<const std::int32_t>(std::get<1>(given)), std::get<2>(given)};
}

}  // namespace

void bind_cuda_keys(py::module_& module) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  module.def("dedup_work_bytes", &dedup_work_bytes);
  // (keys, tables, size), work, (unique_index, inverse, counts, num_unique)
  module.def(
      "dedup",
      [](const std::tuple<Address, Address, Count>& input, Address work,
         const std::tuple<Address, Address, Address, Address>& output, const Place& place) {
        at(place, [&](Stream stream) {
          dedup(to_list(input), as_pointer<void>(work),
                {as_pointer<std::int64_t>(std::get<0>(output)),
                 as_pointer<std::int32_t>(std::get<1>(output)),
                 as_pointer<std::int64_t>(std::get<2>(output)),
                 as_pointer<std::int64_t>(std::get<3>(output))},
                stream);
        });
      },
      release);
  module.def("intersect_work_bytes", &intersect_work_bytes);
  // (keys, tables, size) of both, work, (index_a, index_b, num_matches)
  module.def(
      "intersect",
      [](const std::tuple<Address, Address, Count>& a, const std::tuple<Address, Address, Count>& b,
         Address work, const std::tuple<Address, Address, Address>& output, const Place& place) {
        at(place, [&](Stream stream) {
          intersect(to_list(a), to_list(b), as_pointer<void>(work),
                    {as_pointer<std::int64_t>(std::get<0>(output)),
                     as_pointer<std::int64_t>(std::get<1>(output)),
                     as_pointer<std::int64_t>(std::get<2>(output))},
                    stream);
        });
      },
      release);
  module.def("bucketize_work_bytes", &bucketize_work_bytes);
  // (buckets, size), num_buckets, work, (order, counts, bad_position)
  module.def(
      "bucketize",
      [](const Index& buckets, Count num_buckets, Address work,
         const std::tuple<Address, Address, Address>& output, const Place& place) {
        at(place, [&](Stream stream) {
          bucketize(as_pointer<const std::int32_t>(std::get<0>(buckets)), std::get<1>(buckets),
                    num_buckets, as_pointer<void>(work),
                    {as_pointer<std::int64_t>(std::get<0>(output)),
                     as_pointer<std::int64_t>(std::get<1>(output)),
                     as_pointer<std::int64_t>(std::get<2>(output))},
                    stream);
        });
      },
      release);
}

}  // namespace cuda
}  // namespace nestpipe
