// Row updates for Python: addresses and sizes in, no logic.
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <tuple>

#include "bindings.h"
#include "nestpipe/row_update.h"
#include "rounding.h"

namespace nestpipe {
namespace {

using Hyper = std::map<std::string, double>;

// The settings by their names in Python; a rule's hyper() has those it uses.
UpdateSettings make_settings(std::int32_t rule, std::int64_t step, const Hyper& hyper) {
  const auto value = [&hyper](const char* name) {
    const auto found = hyper.find(name);
    return found == hyper.end() ? 0.0 : found->second;
  };
  UpdateSettings s;
  s.rule = static_cast<UpdateRule>(rule);
  s.step = step;
  s.weight_decay = value("weight_decay");
  s.eps = value("eps");
  s.beta1 = value("beta1");
  s.beta2 = value("beta2");
  s.bias_correction_by_row = value("bias_correction_by_row") != 0.0;
  s.momentum = value("momentum");
  s.dampening = value("dampening");
  s.nesterov = value("nesterov") != 0.0;
  s.beta = value("beta");
  s.l1 = value("l1");
  s.l2 = value("l2");
  return s;
}

}  // namespace

void bind_optim(py::module_& module) {
  using Address = std::uintptr_t;
  // (rows, num_rows, row_floats, dim), (grads, stride), (lr, row_lr, mask), (rule, step, hyper),
  // (data type, rounding)
  using Rows = std::tuple<Address, std::int64_t, std::int64_t, std::int64_t>;
  using Grads = std::tuple<Address, std::int64_t>;
  using PerRow = std::tuple<float, Address, Address>;
  using Settings = std::tuple<std::int32_t, std::int64_t, Hyper>;
  using Storage = std::tuple<int, RoundingTuple>;
  module.def(
      "row_update",
      [](const Rows& rows, const Grads& grads, const PerRow& per_row, const Settings& settings,
         const Storage& storage) {
        UpdateArguments a;
        a.rows = as_pointer<float>(std::get<0>(rows));
        std::tie(std::ignore, a.num_rows, a.row_floats, a.dim) = rows;
        a.grads = as_pointer<const float>(std::get<0>(grads));
        a.grad_stride = std::get<1>(grads);
        a.lr = std::get<0>(per_row);
        a.row_lr = as_pointer<const float>(std::get<1>(per_row));
        a.mask = as_pointer<const std::uint8_t>(std::get<2>(per_row));
        a.data_type = static_cast<DataType>(std::get<0>(storage));
        a.rounding = to_rounding(std::get<1>(storage));
        row_update(
            a, make_settings(std::get<0>(settings), std::get<1>(settings), std::get<2>(settings)));
      },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace nestpipe
