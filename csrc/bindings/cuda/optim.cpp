// Row updates in device memory for Python.
#include "../rounding.h"
#include "../update_arguments.h"
#include "bindings.h"
#include "nestpipe/cuda/row_update.h"

namespace nestpipe {
namespace cuda {

void bind_cuda_optim(py::module_& module) {
  // (rows, num_rows, row_floats, dim), (grads, stride), (lr, row_lr, mask), (rule, step, hyper),
  // (data type, rounding)
  using Rows = std::tuple<Address, Count, Count, Count>;
  using Storage = std::tuple<int, RoundingTuple>;
  module.def(
      "row_update",
      [](const Rows& rows, const Index& grads, const PerRowTuple& per_row,
         const SettingsTuple& settings, const Storage& storage, const Place& place) {
        UpdateArguments a;
        a.rows = as_pointer<float>(std::get<0>(rows));
        std::tie(std::ignore, a.num_rows, a.row_floats, a.dim) = rows;
        a.grads = as_pointer<const float>(std::get<0>(grads));
        a.grad_stride = std::get<1>(grads);
        set_per_row(per_row, &a);
        a.data_type = static_cast<DataType>(std::get<0>(storage));
        a.rounding = to_rounding(std::get<1>(storage));
        at(place, [&](Stream stream) { row_update(a, to_settings(settings), stream); });
      },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace cuda
}  // namespace nestpipe
