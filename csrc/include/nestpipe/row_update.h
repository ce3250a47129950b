// Row-wise update rules in place: one pass over rows, their state and their gradients.
//
// A buffer row is [embedding words | state | int32 updates | padding]. A rule sees the embedding as
// float32; other storage types are widened before and rounded after it. The order of operations per
// element is written in ops/row_update/reference.py; scalars that depend on the step alone are
// computed in double and rounded once. The rules themselves are in csrc/optim/update_rules.inc.
#pragma once

#include <cstdint>
#include <functional>

#include "nestpipe/row_storage.h"

namespace nestpipe {

enum class UpdateRule : std::int32_t {
  kSgd = 0,
  kAdagrad = 1,
  kRowWiseAdagrad = 2,
  kAdam = 3,
  kAdamW = 4,
  kRowWiseAdam = 5,
  kFtrl = 6,
  kLamb = 7,
};

// What a rule does not use is ignored.
struct UpdateSettings {
  UpdateRule rule = UpdateRule::kSgd;
  std::int64_t step = 1;  // 1 for the first update
  double weight_decay = 0.0;
  double eps = 0.0;
  double beta1 = 0.0;
  double beta2 = 0.0;
  bool bias_correction_by_row = false;  // count the row's own updates instead of steps
  double momentum = 0.0;                // SGD; with 0 a row has no state
  double dampening = 0.0;
  bool nesterov = false;
  double beta = 0.0;  // FTRL
  double l1 = 0.0;
  double l2 = 0.0;
};

struct UpdateArguments {
  float* rows = nullptr;             // [num_rows, row_floats]
  float* const* pointers = nullptr;  // [num_rows] where each row lies, instead of `rows`
  std::int64_t num_rows = 0;
  std::int64_t row_floats = 0;
  std::int64_t dim = 0;
  const float* grads = nullptr;  // [num_rows, dim], grad_stride apart
  std::int64_t grad_stride = 0;
  float lr = 0.0f;
  const float* row_lr = nullptr;       // [num_rows], replaces lr
  const std::uint8_t* mask = nullptr;  // [num_rows], 0 leaves the row untouched
  DataType data_type = DataType::kFloat32;
  RandomRounding rounding;

  float* row(std::int64_t u) const {
    return pointers != nullptr ? pointers[u] : rows + u * row_floats;
  }
};

// Floats of state between embedding and `updates`.
std::int64_t state_floats(const UpdateSettings& settings, std::int64_t dim);

// base ** exponent by squaring, exponent >= 0: the same bits everywhere, unlike libm's pow.
double integer_power(double base, std::int64_t exponent);

// Updates every row whose mask is not 0 and adds 1 to its `updates` (which stops at the largest
// int32).
void row_update(const UpdateArguments& arguments, const UpdateSettings& settings);

// The same a few rows at a time: updates rows begin .. end - 1 by gradients [end - begin, dim] that
// stand one after another; `grads` of the arguments is not used. The arguments must outlive it.
using UpdateRows = std::function<void(std::int64_t begin, std::int64_t end, const float* grads)>;
UpdateRows row_updater(const UpdateArguments& arguments, const UpdateSettings& settings);

// For tests: true leaves instructions out that not every processor has.
void use_portable_rules(bool portable);

}  // namespace nestpipe
