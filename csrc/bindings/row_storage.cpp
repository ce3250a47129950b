// Conversions between float32 and the storage types for Python: addresses and sizes in, no logic.
#include "nestpipe/row_storage.h"

#include <pybind11/stl.h>

#include <tuple>

#include "bindings.h"
#include "rounding.h"

namespace nestpipe {
namespace {

using Address = std::uintptr_t;
// (address, num_rows, stride)
using Matrix = std::tuple<Address, std::int64_t, std::int64_t>;
}  // namespace

void bind_storage(py::module_& module) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  module.def(
      "pack_embeddings",
      [](int data_type, const Matrix& values, const Matrix& rows, std::int64_t dim,
         const RoundingTuple& given) {
        const auto type = static_cast<DataType>(data_type);
        const RandomRounding rounding = to_rounding(given);
        const auto [from, num_rows, from_stride] = values;
        const float* const source = as_pointer<const float>(from);
        float* const target = as_pointer<float>(std::get<0>(rows));
        const std::int64_t target_stride = std::get<2>(rows);
        for (std::int64_t u = 0; u < num_rows; ++u) {
          if (rounding.keys == nullptr) {
            pack_embedding(type, source + u * from_stride, dim, target + u * target_stride);
          } else {
            pack_embedding(type, source + u * from_stride, dim, rounding.stream(u),
                           target + u * target_stride);
          }
        }
      },
      release);
}

}  // namespace nestpipe
