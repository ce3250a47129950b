// Settings of an update as they arrive from Python.
#pragma once

#include <pybind11/stl.h>

#include <map>
#include <string>
#include <tuple>

#include "bindings.h"
#include "nestpipe/row_update.h"

namespace nestpipe {

using Hyper = std::map<std::string, double>;
// (rule, step, hyper)
using SettingsTuple = std::tuple<std::int32_t, std::int64_t, Hyper>;
// (lr, row_lr, mask)
using PerRowTuple = std::tuple<float, std::uintptr_t, std::uintptr_t>;

inline void set_per_row(const PerRowTuple& given, UpdateArguments* arguments) {
  arguments->lr = std::get<0>(given);
  arguments->row_lr = as_pointer<const float>(std::get<1>(given));
  arguments->mask = as_pointer<const std::uint8_t>(std::get<2>(given));
}

// The settings by their names in Python; a rule's hyper() has those it uses.
inline UpdateSettings to_settings(const SettingsTuple& given) {
  const auto& [rule, step, hyper_by_name] = given;
  const Hyper& hyper = hyper_by_name;
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

}  // namespace nestpipe
