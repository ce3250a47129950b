// Lookup-and-pool for Python: addresses and sizes in, no logic.
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bindings.h"
#include "nestpipe/lookup_pool.h"

namespace nestpipe {
namespace {

using Address = std::uintptr_t;
// (address, num_rows, stride, dim)
using RowsTuple = std::tuple<Address, std::int64_t, std::int64_t, std::int64_t>;
// (slots, slots_are_int64, num_occurrences, bag_offsets, num_bags, weights)
using BagsTuple = std::tuple<Address, bool, std::int64_t, Address, std::int64_t, Address>;
// (address, stride) of each segment
using MatrixList = std::vector<std::pair<Address, std::int64_t>>;

RowMatrix to_rows(const RowsTuple& rows) {
  return {as_pointer<const float>(std::get<0>(rows)), std::get<1>(rows), std::get<2>(rows),
          std::get<3>(rows)};
}

BagList to_bags(const BagsTuple& bags, std::vector<std::int64_t> segment_bags,
                std::vector<std::int32_t> segment_modes) {
  return {as_pointer<const void>(std::get<0>(bags)),
          std::get<1>(bags),
          std::get<2>(bags),
          as_pointer<const std::int64_t>(std::get<3>(bags)),
          std::get<4>(bags),
          std::move(segment_bags),
          std::move(segment_modes),
          as_pointer<const float>(std::get<5>(bags))};
}

template <typename Matrix, typename T>
std::vector<Matrix> to_matrices(const MatrixList& list) {
  std::vector<Matrix> matrices;
  for (const auto& [address, stride] : list) matrices.push_back({as_pointer<T>(address), stride});
  return matrices;
}

}  // namespace

void bind_pool(py::module_& module) {
  using Bags = std::vector<std::int64_t>;
  using Modes = std::vector<std::int32_t>;
  const auto release = py::call_guard<py::gil_scoped_release>();
  module.def(
      "lookup_pool_forward",
      [](const RowsTuple& rows, const BagsTuple& bags, const Bags& segment_bags,
         const Modes& segment_modes, const MatrixList& outs) {
        lookup_pool_forward(to_rows(rows), to_bags(bags, segment_bags, segment_modes),
                            to_matrices<SegmentOutput, float>(outs));
      },
      release);
  module.def(
      "lookup_pool_backward",
      [](const RowsTuple& rows, const BagsTuple& bags, const Bags& segment_bags,
         const Modes& segment_modes, const MatrixList& grads, Address accumulator) {
        lookup_pool_backward(to_rows(rows), to_bags(bags, segment_bags, segment_modes),
                             to_matrices<SegmentGradient, const float>(grads),
                             as_pointer<float>(accumulator));
      },
      release);
  module.def(
      "lookup_pool_weight_grad",
      [](const RowsTuple& rows, const BagsTuple& bags, const Bags& segment_bags,
         const Modes& segment_modes, const MatrixList& grads, Address weight_grad) {
        lookup_pool_weight_grad(to_rows(rows), to_bags(bags, segment_bags, segment_modes),
                                to_matrices<SegmentGradient, const float>(grads),
                                as_pointer<float>(weight_grad));
      },
      release);
}

}  // namespace nestpipe
