// Row-wise update rules in place: one pass over rows, their state and their gradients.
//
// A buffer row is [embedding words | state | int32 updates | padding]. A rule sees the embedding as
// float32; other storage types are widened before and rounded after it. The order of operations per
// element is written in ops/row_update/reference.py; scalars that depend on the step alone are
// computed in double and rounded once. The rules themselves are in csrc/optim/update_rules.inc.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>

#include "nestpipe/host_device.h"
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
NESTPIPE_HOST_DEVICE inline double integer_power(double base, std::int64_t exponent) {
  double power = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0) power *= base;
    base *= base;
  }
  return power;
}

// What divides out that moments start at 0, at update t: 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t)
// and, for rules whose eps is added to the uncorrected root, both in one.
struct BiasFactors {
  float first;
  float second;
  float both;

  NESTPIPE_HOST_DEVICE BiasFactors(double beta1, double beta2, std::int64_t t) {
    const double one = 1.0 - integer_power(beta1, t);
    const double root = std::sqrt(1.0 - integer_power(beta2, t));
    first = static_cast<float>(1.0 / one);
    second = static_cast<float>(1.0 / root);
    both = static_cast<float>(root / one);
  }
};

// FTRL: a smaller learning rate moves nothing, as its reciprocal could overflow.
constexpr float kSmallestFtrlRate = 0x1p-100f;

// A row's count after one more update. It stops at the largest int32.
NESTPIPE_HOST_DEVICE inline std::int32_t counted(std::int32_t updates) {
  return updates < 0x7FFFFFFF ? updates + 1 : updates;
}

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
