// Row updates for Python: addresses and sizes in, no logic.
#include <pybind11/stl.h>

#include <tuple>

#include "bindings.h"
#include "nestpipe/row_update.h"

namespace nestpipe {

void bind_optim(py::module_& module) {
  using Address = std::uintptr_t;
  // (rows, num_rows, row_floats, dim), (grads, stride), (lr, row_lr, mask), (rule, eps, beta1,
  // beta2, by_row, step)
  using Rows = std::tuple<Address, std::int64_t, std::int64_t, std::int64_t>;
  using Grads = std::tuple<Address, std::int64_t>;
  using PerRow = std::tuple<float, Address, Address>;
  using Settings = std::tuple<std::int32_t, double, double, double, bool, std::int64_t>;
  module.def(
      "row_update",
      [](const Rows& rows, const Grads& grads, const PerRow& per_row, const Settings& settings) {
        UpdateArguments a;
        a.rows = as_pointer<float>(std::get<0>(rows));
        std::tie(std::ignore, a.num_rows, a.row_floats, a.dim) = rows;
        a.grads = as_pointer<const float>(std::get<0>(grads));
        a.grad_stride = std::get<1>(grads);
        a.lr = std::get<0>(per_row);
        a.row_lr = as_pointer<const float>(std::get<1>(per_row));
        a.mask = as_pointer<const std::uint8_t>(std::get<2>(per_row));
        UpdateSettings s;
        s.rule = static_cast<UpdateRule>(std::get<0>(settings));
        std::tie(std::ignore, s.eps, s.beta1, s.beta2, s.bias_correction_by_row, s.step) = settings;
        row_update(a, s);
      },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace nestpipe
