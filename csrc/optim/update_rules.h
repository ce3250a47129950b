// The update rules, one row at a time: an object per rule, made from the settings of a call, whose
// operator() changes embedding and state of one row. Written line by line in
// ops/row_update/reference.py; every line here is the same float32 operation.
//
// Whether there is weight decay is a template argument (`kDecay`), so that no loop branches per
// element and all of them vectorize (check with -fopt-info-vec after a change).
#pragma once

#include <cmath>
#include <cstdint>

#include "nestpipe/lane_sum.h"
#include "nestpipe/row_update.h"

namespace nestpipe {

// One row as a rule sees it. The embedding is float32 whatever it is stored as.
struct RowParts {
  float* embedding;   // [dim]
  float* state;       // [state_floats]
  const float* grad;  // [dim]
  float* scratch;     // [dim] to overwrite
  std::int64_t dim;
  float lr;
  std::int32_t updates;  // how often the row was updated before
};

// Decay that is added to the gradient: grad + decay * embedding.
template <bool kDecay>
inline float decayed(float grad, float decay, float embedding) {
  if constexpr (kDecay) {
    return grad + decay * embedding;
  } else {
    return grad;
  }
}

template <bool kDecay>
struct Sgd {
  float decay;

  explicit Sgd(const UpdateSettings& s) : decay(static_cast<float>(s.weight_decay)) {}

  void operator()(const RowParts& row) const {
    float* __restrict p = row.embedding;
    const float* __restrict grad = row.grad;
    for (std::int64_t d = 0; d < row.dim; ++d)
      p[d] -= row.lr * decayed<kDecay>(grad[d], decay, p[d]);
  }
};

template <bool kDecay, bool kNesterov>
struct MomentumSgd {
  float decay;
  float momentum;
  float one_minus_dampening;

  explicit MomentumSgd(const UpdateSettings& s)
      : decay(static_cast<float>(s.weight_decay)),
        momentum(static_cast<float>(s.momentum)),
        one_minus_dampening(static_cast<float>(1.0 - s.dampening)) {}

  void operator()(const RowParts& row) const {
    float* __restrict p = row.embedding;
    float* __restrict buffer = row.state;
    const float* __restrict grad = row.grad;
    const bool first = row.updates == 0;
    const float keep = first ? 0.0f : momentum;
    const float take = first ? 1.0f : one_minus_dampening;
    for (std::int64_t d = 0; d < row.dim; ++d) {
      const float g = decayed<kDecay>(grad[d], decay, p[d]);
      const float b = keep * buffer[d] + take * g;
      buffer[d] = b;
      p[d] -= row.lr * (kNesterov ? g + momentum * b : b);
    }
  }
};

template <bool kDecay>
struct Adagrad {
  float decay;
  float eps;

  explicit Adagrad(const UpdateSettings& s)
      : decay(static_cast<float>(s.weight_decay)), eps(static_cast<float>(s.eps)) {}

  void operator()(const RowParts& row) const {
    float* __restrict p = row.embedding;
    float* __restrict sum = row.state;
    const float* __restrict grad = row.grad;
    for (std::int64_t d = 0; d < row.dim; ++d) {
      const float g = decayed<kDecay>(grad[d], decay, p[d]);
      const float s = sum[d] + g * g;
      sum[d] = s;
      p[d] -= row.lr * (g / (std::sqrt(s) + eps));
    }
  }
};

template <bool kDecay>
struct RowWiseAdagrad {
  float decay;
  float eps;

  explicit RowWiseAdagrad(const UpdateSettings& s)
      : decay(static_cast<float>(s.weight_decay)), eps(static_cast<float>(s.eps)) {}

  void operator()(const RowParts& row) const {
    float* __restrict p = row.embedding;
    const float* __restrict grad = row.grad;
    const float added = decay;
    const float square_sum = lane_sum(row.dim, [=](std::int64_t d) {
      const float g = decayed<kDecay>(grad[d], added, p[d]);
      return g * g;
    });
    const float sum = row.state[0] + square_sum / static_cast<float>(row.dim);
    row.state[0] = sum;
    const float scale = row.lr / (std::sqrt(sum) + eps);
    for (std::int64_t d = 0; d < row.dim; ++d) {
      p[d] -= scale * decayed<kDecay>(grad[d], added, p[d]);
    }
  }
};

// What divides out that moments start at 0, at update t: 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t)
// and, for rules whose eps is added to the uncorrected root, both in one.
struct BiasFactors {
  float first;
  float second;
  float both;

  BiasFactors(const UpdateSettings& s, std::int64_t t) {
    const double one = 1.0 - integer_power(s.beta1, t);
    const double root = std::sqrt(1.0 - integer_power(s.beta2, t));
    first = static_cast<float>(1.0 / one);
    second = static_cast<float>(1.0 / root);
    both = static_cast<float>(root / one);
  }
};

// Settings that the rules with two moments share.
struct Moments {
  UpdateSettings settings;
  BiasFactors of_step;
  float decay;
  float one_minus_beta1;
  float one_minus_beta2;
  float eps;

  explicit Moments(const UpdateSettings& s)
      : settings(s),
        of_step(s, s.step),
        decay(static_cast<float>(s.weight_decay)),
        one_minus_beta1(static_cast<float>(1.0 - s.beta1)),
        one_minus_beta2(static_cast<float>(1.0 - s.beta2)),
        eps(static_cast<float>(s.eps)) {}

  BiasFactors factors(const RowParts& row) const {
    if (!settings.bias_correction_by_row) return of_step;
    return BiasFactors(settings, std::int64_t{row.updates} + 1);
  }
};

inline float moved(float moment, float value, float share) {
  return moment + (value - moment) * share;
}

template <bool kDecay>
struct Adam : Moments {
  using Moments::Moments;

  void operator()(const RowParts& row) const {
    float* __restrict p = row.embedding;
    float* __restrict first = row.state;
    float* __restrict second = row.state + row.dim;
    const float* __restrict grad = row.grad;
    const float step_size = row.lr * factors(row).both;
    for (std::int64_t d = 0; d < row.dim; ++d) {
      const float g = decayed<kDecay>(grad[d], decay, p[d]);
      const float m = moved(first[d], g, one_minus_beta1);
      const float v = moved(second[d], g * g, one_minus_beta2);
      first[d] = m;
      second[d] = v;
      p[d] -= step_size * (m / (std::sqrt(v) + eps));
    }
  }
};

struct AdamW : Moments {
  using Moments::Moments;

  void operator()(const RowParts& row) const {
    float* __restrict p = row.embedding;
    float* __restrict first = row.state;
    float* __restrict second = row.state + row.dim;
    const float* __restrict grad = row.grad;
    const BiasFactors bias = factors(row);
    const float step_size = row.lr * bias.first;
    const float shrink = row.lr * decay;
    for (std::int64_t d = 0; d < row.dim; ++d) {
      const float g = grad[d];
      const float m = moved(first[d], g, one_minus_beta1);
      const float v = moved(second[d], g * g, one_minus_beta2);
      first[d] = m;
      second[d] = v;
      p[d] = (p[d] - shrink * p[d]) - step_size * (m / (std::sqrt(v) * bias.second + eps));
    }
  }
};

struct RowWiseAdam : Moments {
  using Moments::Moments;

  void operator()(const RowParts& row) const {
    float* __restrict p = row.embedding;
    float* __restrict first = row.state;
    const float* __restrict grad = row.grad;
    const BiasFactors bias = factors(row);
    const float square_sum = lane_sum(row.dim, [=](std::int64_t d) { return grad[d] * grad[d]; });
    const float v =
        moved(row.state[row.dim], square_sum / static_cast<float>(row.dim), one_minus_beta2);
    row.state[row.dim] = v;
    const float scale = (row.lr * bias.first) / (std::sqrt(v) * bias.second + eps);
    const float shrink = row.lr * decay;
    for (std::int64_t d = 0; d < row.dim; ++d) {
      const float m = moved(first[d], grad[d], one_minus_beta1);
      first[d] = m;
      p[d] = (p[d] - shrink * p[d]) - scale * m;
    }
  }
};

template <bool kDecay>
struct Lamb : Moments {
  using Moments::Moments;

  void operator()(const RowParts& row) const {
    float* __restrict p = row.embedding;
    float* __restrict first = row.state;
    float* __restrict second = row.state + row.dim;
    float* __restrict direction = row.scratch;
    const float* __restrict grad = row.grad;
    const BiasFactors bias = factors(row);
    for (std::int64_t d = 0; d < row.dim; ++d) {
      const float g = grad[d];
      const float m = moved(first[d], g, one_minus_beta1);
      const float v = moved(second[d], g * g, one_minus_beta2);
      first[d] = m;
      second[d] = v;
      direction[d] = (m * bias.first) / (std::sqrt(v) * bias.second + eps);
    }
    // A loop of its own: with five arrays the compiler checks too many pairs for overlap to
    // vectorize.
    if constexpr (kDecay) {
      for (std::int64_t d = 0; d < row.dim; ++d) direction[d] += decay * p[d];
    }
    const float weight = std::sqrt(lane_sum(row.dim, [=](std::int64_t d) { return p[d] * p[d]; }));
    const float length =
        std::sqrt(lane_sum(row.dim, [=](std::int64_t d) { return direction[d] * direction[d]; }));
    const float ratio = weight > 0.0f && length > 0.0f ? weight / length : 1.0f;
    const float step_size = row.lr * ratio;
    for (std::int64_t d = 0; d < row.dim; ++d) p[d] -= step_size * direction[d];
  }
};

// State: z [dim], n [dim]. The embedding leads: z is read only where the embedding is 0.
template <bool kDecay>
struct Ftrl {
  // A smaller learning rate moves nothing: its reciprocal could overflow.
  static constexpr float kSmallestRate = 0x1p-100f;

  float decay;
  float beta;
  float l1;
  float l2;

  explicit Ftrl(const UpdateSettings& s)
      : decay(static_cast<float>(s.weight_decay)),
        beta(static_cast<float>(s.beta)),
        l1(static_cast<float>(s.l1)),
        l2(static_cast<float>(s.l2)) {}

  void operator()(const RowParts& row) const {
    if (row.lr < kSmallestRate) return;
    float* __restrict p = row.embedding;
    float* __restrict linear = row.state;
    float* __restrict squares = row.state + row.dim;
    const float* __restrict grad = row.grad;
    for (std::int64_t d = 0; d < row.dim; ++d) {
      const float start = p[d];
      const float g = decayed<kDecay>(grad[d], decay, start);
      const float n = squares[d] + g * g;
      const float q = (beta + std::sqrt(n)) / row.lr + l2;
      const float held = clamped(linear[d], l1);
      const float c = start > 0.0f ? l1 : start < 0.0f ? -l1 : -held;
      const float t = start + (c - g) / q;
      squares[d] = n;
      linear[d] = -(t * q);
      p[d] = t - clamped(t, l1 / q);
    }
  }

 private:
  static float clamped(float value, float limit) {
    return value > limit ? limit : value < -limit ? -limit : value;
  }
};

}  // namespace nestpipe
