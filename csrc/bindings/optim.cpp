// Row updates for Python: addresses and sizes in, no logic.
#include "bindings.h"
#include "rounding.h"
#include "update_arguments.h"

namespace nestpipe {

void bind_optim(py::module_& module) {
  using Address = std::uintptr_t;
  // (rows, num_rows, row_floats, dim), (grads, stride), (lr, row_lr, mask), (rule, step, hyper),
  // (data type, rounding)
  using Rows = std::tuple<Address, std::int64_t, std::int64_t, std::int64_t>;
  using Grads = std::tuple<Address, std::int64_t>;
  using Storage = std::tuple<int, RoundingTuple>;
  module.def(
      "row_update",
      [](const Rows& rows, const Grads& grads, const PerRowTuple& per_row,
         const SettingsTuple& settings, const Storage& storage) {
        UpdateArguments a;
        a.rows = as_pointer<float>(std::get<0>(rows));
        std::tie(std::ignore, a.num_rows, a.row_floats, a.dim) = rows;
        a.grads = as_pointer<const float>(std::get<0>(grads));
        a.grad_stride = std::get<1>(grads);
        set_per_row(per_row, &a);
        a.data_type = static_cast<DataType>(std::get<0>(storage));
        a.rounding = to_rounding(std::get<1>(storage));
        row_update(a, to_settings(settings));
      },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace nestpipe
