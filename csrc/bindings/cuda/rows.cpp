// Movement of rows in device memory for Python. Every operation leaves the first position whose
// index is out of range in *bad_position.
#include "nestpipe/cuda/rows.h"

#include "bindings.h"

namespace nestpipe {
namespace cuda {
namespace {

using Scatter = void (*)(const ScatterRows&, std::int64_t*, Stream);

// target, index, source (or zeros: none), dim, bad_position
void bind_scatter(py::module_& module, const char* name, Scatter scatter) {
  module.def(
      name,
      [scatter](const Matrix& target, const Index& index, const Matrix& source, Count dim,
                Address bad_position, const Place& place) {
        ScatterRows a;
        a.target = as_pointer<float>(std::get<0>(target));
        std::tie(std::ignore, a.num_rows, a.target_stride) = target;
        a.dim = dim;
        a.index = as_pointer<const std::int64_t>(std::get<0>(index));
        a.size = std::get<1>(index);
        a.source = as_pointer<const float>(std::get<0>(source));
        a.source_stride = std::get<2>(source);
        at(place,
           [&](Stream stream) { scatter(a, as_pointer<std::int64_t>(bad_position), stream); });
      },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_cuda_rows(py::module_& module) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  module.def(
      "gather_rows",
      [](const Matrix& rows, const Index& index, const Matrix& out, Count dim, int data_type,
         Address bad_position, const Place& place) {
        const GatherRows a = {as_pointer<const float>(std::get<0>(rows)),
                              std::get<1>(rows),
                              std::get<2>(rows),
                              dim,
                              as_pointer<const std::int64_t>(std::get<0>(index)),
                              std::get<1>(index),
                              as_pointer<float>(std::get<0>(out)),
                              std::get<2>(out),
                              static_cast<DataType>(data_type)};
        at(place,
           [&](Stream stream) { gather_rows(a, as_pointer<std::int64_t>(bad_position), stream); });
      },
      release);
  // source, target (contiguous), (source_index, target_index, size), bad_position
  module.def(
      "row_sync",
      [](const Matrix& source, const Matrix& target,
         const std::tuple<Address, Address, Count>& index, Address bad_position,
         const Place& place) {
        const RowSync a = {as_pointer<const float>(std::get<0>(source)),
                           std::get<1>(source),
                           as_pointer<float>(std::get<0>(target)),
                           std::get<1>(target),
                           std::get<2>(source),
                           as_pointer<const std::int64_t>(std::get<0>(index)),
                           as_pointer<const std::int64_t>(std::get<1>(index)),
                           std::get<2>(index)};
        at(place,
           [&](Stream stream) { row_sync(a, as_pointer<std::int64_t>(bad_position), stream); });
      },
      release);
  bind_scatter(module, "scatter_rows", &scatter_rows);
  bind_scatter(module, "scatter_add_rows", &scatter_add_rows);
  bind_scatter(module, "zero_rows", &zero_rows);
}

}  // namespace cuda
}  // namespace nestpipe
