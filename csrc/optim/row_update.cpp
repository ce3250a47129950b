// SGD, Adagrad, row-wise Adagrad and Adam over buffer rows.
#include "nestpipe/row_update.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "nestpipe/lane_sum.h"
#include "nestpipe/row_tasks.h"

namespace nestpipe {
namespace {

// One row's parts, and the numbers that are the same for the whole row.
struct Row {
  float* __restrict embedding;
  float* __restrict state;
  const float* __restrict grad;
  float lr;
};

void update_sgd(const Row& row, std::int64_t dim) {
  for (std::int64_t d = 0; d < dim; ++d) row.embedding[d] -= row.lr * row.grad[d];
}

void update_adagrad(const Row& row, std::int64_t dim, float eps) {
  float* __restrict embedding = row.embedding;
  float* __restrict sum = row.state;
  const float* __restrict grad = row.grad;
  for (std::int64_t d = 0; d < dim; ++d) {
    const float g = grad[d];
    const float s = sum[d] + g * g;
    sum[d] = s;
    embedding[d] -= row.lr * (g / (std::sqrt(s) + eps));
  }
}

void update_row_wise_adagrad(const Row& row, std::int64_t dim, float eps) {
  const float* __restrict grad = row.grad;
  const float square_sum = lane_sum(dim, [grad](std::int64_t d) { return grad[d] * grad[d]; });
  const float sum = row.state[0] + square_sum / static_cast<float>(dim);
  row.state[0] = sum;
  const float scale = row.lr / (std::sqrt(sum) + eps);
  for (std::int64_t d = 0; d < dim; ++d) row.embedding[d] -= scale * grad[d];
}

struct AdamScalars {
  float one_minus_beta1;
  float one_minus_beta2;
  float eps;
};

void update_adam(const Row& row, std::int64_t dim, const AdamScalars& scalars, float bias_factor) {
  float* __restrict embedding = row.embedding;
  float* __restrict first = row.state;
  float* __restrict second = row.state + dim;
  const float* __restrict grad = row.grad;
  const float step_size = row.lr * bias_factor;
  for (std::int64_t d = 0; d < dim; ++d) {
    const float g = grad[d];
    const float m = first[d] + (g - first[d]) * scalars.one_minus_beta1;
    const float v = second[d] + (g * g - second[d]) * scalars.one_minus_beta2;
    first[d] = m;
    second[d] = v;
    embedding[d] -= step_size * (m / (std::sqrt(v) + scalars.eps));
  }
}

std::int32_t read_updates(const float* header) {
  std::int32_t updates;
  std::memcpy(&updates, header, sizeof updates);
  return updates;
}

void count_update(float* header) {
  std::int32_t updates = read_updates(header);
  if (updates < std::numeric_limits<std::int32_t>::max()) ++updates;
  std::memcpy(header, &updates, sizeof updates);
}

}  // namespace

std::int64_t state_floats(UpdateRule rule, std::int64_t dim) {
  switch (rule) {
    case UpdateRule::kSgd:
      return 0;
    case UpdateRule::kAdagrad:
      return dim;
    case UpdateRule::kRowWiseAdagrad:
      return 1;
    case UpdateRule::kAdam:
      return 2 * dim;
  }
  throw std::invalid_argument("row_update: unknown update rule " +
                              std::to_string(static_cast<std::int32_t>(rule)));
}

double integer_power(double base, std::int64_t exponent) {
  double power = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0) power *= base;
    base *= base;
  }
  return power;
}

float adam_bias_factor(double beta1, double beta2, std::int64_t step) {
  return static_cast<float>(std::sqrt(1.0 - integer_power(beta2, step)) /
                            (1.0 - integer_power(beta1, step)));
}

void row_update(const UpdateArguments& a, const UpdateSettings& settings) {
  const std::int64_t header = a.dim + state_floats(settings.rule, a.dim);
  const auto eps = static_cast<float>(settings.eps);
  const AdamScalars adam = {static_cast<float>(1.0 - settings.beta1),
                            static_cast<float>(1.0 - settings.beta2), eps};
  const bool is_adam = settings.rule == UpdateRule::kAdam;
  const float step_factor = is_adam && !settings.bias_correction_by_row
                                ? adam_bias_factor(settings.beta1, settings.beta2, settings.step)
                                : 0.0f;
  const auto update = [&](std::int64_t u) {
    float* data = a.rows + u * a.row_floats;
    const Row row = {data, data + a.dim, a.grads + u * a.grad_stride,
                     a.row_lr != nullptr ? a.row_lr[u] : a.lr};
    if (settings.rule == UpdateRule::kSgd) {
      update_sgd(row, a.dim);
    } else if (settings.rule == UpdateRule::kAdagrad) {
      update_adagrad(row, a.dim, eps);
    } else if (settings.rule == UpdateRule::kRowWiseAdagrad) {
      update_row_wise_adagrad(row, a.dim, eps);
    } else if (settings.bias_correction_by_row) {
      const std::int64_t count = std::int64_t{read_updates(data + header)} + 1;
      update_adam(row, a.dim, adam, adam_bias_factor(settings.beta1, settings.beta2, count));
    } else {
      update_adam(row, a.dim, adam, step_factor);
    }
    count_update(data + header);
  };
  parallel_ranges(a.num_rows, rows_per_task(a.row_floats),
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t u = begin; u < end; ++u) {
                      if (a.mask == nullptr || a.mask[u] != 0) update(u);
                    }
                  });
}

}  // namespace nestpipe
