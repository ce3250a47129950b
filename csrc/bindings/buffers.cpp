// Row movement between buffers and messages for Python: addresses and sizes in, no logic.
#include <pybind11/stl.h>

#include <tuple>

#include "bindings.h"
#include "nestpipe/finite_rows.h"
#include "nestpipe/gather_rows.h"
#include "nestpipe/mean_sources.h"
#include "nestpipe/row_sync.h"
#include "nestpipe/scatter_add_rows.h"
#include "nestpipe/take_rows.h"
#include "nestpipe/wire_rows.h"

namespace nestpipe {
namespace {

using Address = std::uintptr_t;
// (address, num_rows, stride)
using Matrix = std::tuple<Address, std::int64_t, std::int64_t>;
// (address, size)
using Index = std::tuple<Address, std::int64_t>;

ScatterRows to_scatter(const Matrix& target, const Index& index, const Matrix& source,
                       std::int64_t dim) {
  ScatterRows a;
  a.target = as_pointer<float>(std::get<0>(target));
  std::tie(std::ignore, a.num_rows, a.target_stride) = target;
  a.dim = dim;
  a.index = as_pointer<const std::int64_t>(std::get<0>(index));
  a.size = std::get<1>(index);
  a.source = as_pointer<const float>(std::get<0>(source));
  a.source_stride = std::get<2>(source);
  return a;
}

}  // namespace

void bind_buffers(py::module_& module) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  module.def(
      "row_sync",
      [](const Matrix& source, const Matrix& target, Address source_index, Address target_index,
         std::int64_t size) {
        row_sync({as_pointer<const float>(std::get<0>(source)), std::get<1>(source),
                  as_pointer<float>(std::get<0>(target)), std::get<1>(target), std::get<2>(source),
                  as_pointer<const std::int64_t>(source_index),
                  as_pointer<const std::int64_t>(target_index), size});
      },
      release);
  module.def(
      "gather_rows",
      [](const Matrix& rows, const Index& index, const Matrix& out, std::int64_t dim,
         int data_type) {
        gather_rows({as_pointer<const float>(std::get<0>(rows)), std::get<1>(rows),
                     std::get<2>(rows), dim, as_pointer<const std::int64_t>(std::get<0>(index)),
                     std::get<1>(index), as_pointer<float>(std::get<0>(out)), std::get<2>(out),
                     static_cast<DataType>(data_type)});
      },
      release);
  module.def(
      "scatter_rows",
      [](const Matrix& target, const Index& index, const Matrix& source, std::int64_t dim) {
        scatter_rows(to_scatter(target, index, source, dim));
      },
      release);
  module.def(
      "scatter_add_rows",
      [](const Matrix& target, const Index& index, const Matrix& source, std::int64_t dim) {
        scatter_add_rows(to_scatter(target, index, source, dim));
      },
      release);
  module.def(
      "zero_rows",
      [](const Matrix& target, const Index& index, std::int64_t dim) {
        zero_rows(to_scatter(target, index, Matrix(0, 0, 0), dim));
      },
      release);
  module.def(
      "entries_by_row",
      [](const Index& slot, std::int64_t num_rows, Address starts, Address order) {
        entries_by_row(as_pointer<const std::int64_t>(std::get<0>(slot)), std::get<1>(slot),
                       num_rows, as_pointer<std::int64_t>(starts), as_pointer<std::int64_t>(order));
      },
      release);
  // (starts, order) from entries_by_row, (ends, divisors, number) of sources, chosen rows or (0, 0)
  module.def(
      "mean_sources",
      [](const Matrix& total, Address countable, const Matrix& boxes,
         const std::tuple<Address, Address>& entries,
         const std::tuple<Address, Address, std::int64_t>& sources, const Index& rows,
         float limit) {
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
        mean_sources(a);
      },
      release);
  module.def(
      "take_rows",
      [](const Matrix& matrix, const Index& index, std::int64_t dim, Address out, Address peaks) {
        TakeRows a;
        a.matrix = as_pointer<float>(std::get<0>(matrix));
        std::tie(std::ignore, a.num_rows, a.stride) = matrix;
        a.dim = dim;
        a.index = as_pointer<const std::int64_t>(std::get<0>(index));
        a.size = std::get<1>(index);
        a.out = as_pointer<float>(out);
        a.peaks = as_pointer<float>(peaks);
        take_rows(a);
      },
      release);
  module.def(
      "finite_rows",
      [](const Matrix& rows, std::int64_t dim, Address finite) {
        finite_rows(as_pointer<const float>(std::get<0>(rows)), std::get<1>(rows),
                    std::get<2>(rows), dim, as_pointer<std::uint8_t>(finite));
      },
      release);
  module.def(
      "all_finite",
      [](const Matrix& rows, std::int64_t dim) {
        return all_finite(as_pointer<const float>(std::get<0>(rows)), std::get<1>(rows),
                          std::get<2>(rows), dim);
      },
      release);
  module.def(
      "encode_rows",
      [](int format, const Matrix& rows, std::int64_t dim, Address message) {
        encode_rows(static_cast<WireFormat>(format), as_pointer<const float>(std::get<0>(rows)),
                    std::get<1>(rows), std::get<2>(rows), dim, as_pointer<std::uint8_t>(message));
      },
      release);
  module.def(
      "decode_rows",
      [](int format, Address message, std::int64_t num_rows, std::int64_t dim, Address rows) {
        decode_rows(static_cast<WireFormat>(format), as_pointer<const std::uint8_t>(message),
                    num_rows, dim, as_pointer<float>(rows));
      },
      release);
}

}  // namespace nestpipe
