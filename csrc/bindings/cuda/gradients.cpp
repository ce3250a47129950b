// Row gradients in device memory for Python; bad_position as in rows.cpp.
#include "nestpipe/cuda/gradients.h"

#include "bindings.h"

namespace nestpipe {
namespace cuda {

void bind_cuda_gradients(py::module_& module) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  // total, countable, boxes, (starts, order), (ends, divisors, number) of sources, chosen rows or
  // (0, 0), limit, bad_position
  module.def(
      "mean_sources",
      [](const Matrix& total, Address countable, const Matrix& boxes,
         const std::tuple<Address, Address>& entries,
         const std::tuple<Address, Address, Count>& sources, const Index& rows, float limit,
         Address bad_position, const Place& place) {
        MeanSources a;
        a.total = as_pointer<float>(std::get<0>(total));
        std::tie(std::ignore, a.num_rows, a.dim) = total;
        a.countable = as_pointer<std::uint8_t>(countable);
        a.boxes = as_pointer<const float>(std::get<0>(boxes));
        a.size = std::get<1>(boxes);
        a.starts = as_pointer<const std::int64_t>(std::get<0>(entries));
        a.order = as_pointer<const std::int64_t>(std::get<1>(entries));
        a.source_ends = as_pointer<const std::int64_t>(std::get<0>(sources));
        a.divisors = as_pointer<const float>(std::get<1>(sources));
        a.num_sources = std::get<2>(sources);
        a.rows = as_pointer<const std::int64_t>(std::get<0>(rows));
        a.num_chosen = std::get<1>(rows);
        a.limit = limit;
        at(place,
           [&](Stream stream) { mean_sources(a, as_pointer<std::int64_t>(bad_position), stream); });
      },
      release);
  module.def(
      "take_rows",
      [](const Matrix& matrix, const Index& index, Count dim, Address out, Address peaks,
         Address bad_position, const Place& place) {
        TakeRows a;
        a.matrix = as_pointer<float>(std::get<0>(matrix));
        std::tie(std::ignore, a.num_rows, a.stride) = matrix;
        a.dim = dim;
        a.index = as_pointer<const std::int64_t>(std::get<0>(index));
        a.size = std::get<1>(index);
        a.out = as_pointer<float>(out);
        a.peaks = as_pointer<float>(peaks);
        at(place,
           [&](Stream stream) { take_rows(a, as_pointer<std::int64_t>(bad_position), stream); });
      },
      release);
  const auto bind_finite = [&](const char* name, auto run) {
    module.def(
        name,
        [run](const Matrix& rows, Count dim, Address finite, const Place& place) {
          at(place, [&](Stream stream) {
            run(as_pointer<const float>(std::get<0>(rows)), std::get<1>(rows), std::get<2>(rows),
                dim, as_pointer<std::uint8_t>(finite), stream);
          });
        },
        release);
  };
  bind_finite("finite_rows", &finite_rows);
  bind_finite("all_finite", &all_finite);
}

}  // namespace cuda
}  // namespace nestpipe
