// Lookup-and-pool in device memory for Python; bad_position as in rows.cpp.
#include "bindings.h"
#include "nestpipe/cuda/lookup_pool.h"

namespace nestpipe {
namespace cuda {
namespace {

// (address, num_rows, stride, dim)
using Rows = std::tuple<Address, Count, Count, Count>;
// (slots, slots_are_int64, num_occurrences, bag_offsets, num_bags, weights)
using Bags = std::tuple<Address, bool, Count, Address, Count, Address>;
// (address, number, aligned, has_means, num_maxima)
using Segments = std::tuple<Address, Count, bool, bool, Count>;

RowMatrix to_rows(const Rows& given) {
  RowMatrix rows;
  rows.data = as_pointer<const float>(std::get<0>(given));
  std::tie(std::ignore, rows.num_rows, rows.stride, rows.dim) = given;
  return rows;
}

PoolBags to_bags(const Bags& given, const Segments& segments) {
  PoolBags bags;
  bags.slots = as_pointer<const void>(std::get<0>(given));
  bags.slots_are_int64 = std::get<1>(given);
  bags.num_occurrences = std::get<2>(given);
  bags.bag_offsets = as_pointer<const std::int64_t>(std::get<3>(given));
  bags.num_bags = std::get<4>(given);
  bags.weights = as_pointer<const float>(std::get<5>(given));
  bags.segments = as_pointer<const PoolSegment>(std::get<0>(segments));
  std::tie(std::ignore, bags.num_segments, bags.aligned, bags.has_means, bags.num_maxima) =
      segments;
  return bags;
}

}  // namespace

void bind_cuda_pool(py::module_& module) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  module.def(
      "lookup_pool_forward",
      [](const Rows& rows, const Bags& bags, const Segments& segments, Address bad_position,
         const Place& place) {
        at(place, [&](Stream stream) {
          lookup_pool_forward(to_rows(rows), to_bags(bags, segments),
                              as_pointer<std::int64_t>(bad_position), stream);
        });
      },
      release);
  module.def("lookup_pool_backward_work_bytes",
             [](const Bags& bags, const Segments& segments, Count num_rows, Count dim) {
               return lookup_pool_backward_work_bytes(to_bags(bags, segments), num_rows, dim);
             });
  module.def(
      "lookup_pool_backward",
      [](const Rows& rows, const Bags& bags, const Segments& segments, Address work,
         Address accumulator, Address bad_position, const Place& place) {
        at(place, [&](Stream stream) {
          lookup_pool_backward(to_rows(rows), to_bags(bags, segments), as_pointer<void>(work),
                               as_pointer<float>(accumulator),
                               as_pointer<std::int64_t>(bad_position), stream);
        });
      },
      release);
  module.def(
      "lookup_pool_weight_grad",
      [](const Rows& rows, const Bags& bags, const Segments& segments, Address weight_grad,
         Address bad_position, const Place& place) {
        at(place, [&](Stream stream) {
          lookup_pool_weight_grad(to_rows(rows), to_bags(bags, segments),
                                  as_pointer<float>(weight_grad),
                                  as_pointer<std::int64_t>(bad_position), stream);
        });
      },
      release);
}

}  // namespace cuda
}  // namespace nestpipe
