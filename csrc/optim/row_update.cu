// Row updates in device memory: some lanes a row, embeddings widened and rounded in registers.
//
// A rule is an object made from the settings of a call, whose operator() changes one row in passes
// over its elements, 1 or 4 of them a lane at a time; every line is the same float32 operation as
// in ops/row_update/reference.py. Rules that sum over the row take as many lanes as make 16
// accumulators, others as many as cover the row.
//
// Floor, bytes a row: 2 * (embedding + state + 4) + 4 * dim, the gradient's.
#include <cmath>
#include <stdexcept>
#include <string>

#include "../cuda/row_lanes.cuh"
#include "../cuda/row_units.cuh"
#include "nestpipe/cuda/row_update.h"

namespace nestpipe {
namespace cuda {
namespace {

// Of an element: embedding, two columns of state (as far as the rule has them), gradient.
struct Element {
  float p, first, second, g;
};

// What a pass writes.
enum Writes { kNothing = 0, kEmbedding = 1, kState = 2, kBoth = 3 };

// One row as its lanes see it.
template <int kWidth>
struct Row {
  float* embedding;   // words of the storage type
  float* state;       // columns of [dim]
  const float* grad;  // [dim]
  std::int64_t dim;
  DataType data_type;
  bool at_random;
  std::uint64_t stream;  // of random words
  unsigned lanes;
  float lr;
  std::int32_t updates;  // how often the row was updated before
  float scalar;          // of rules with one number of state for the row; written after the rule

  __device__ __forceinline__ float widen(std::uint16_t half) const {
    return data_type == DataType::kBFloat16 ? bfloat16_to_float(half) : float16_to_float(half);
  }

  __device__ __forceinline__ std::uint16_t narrow(float value, std::int64_t d) const {
    const bool brain = data_type == DataType::kBFloat16;
    if (!at_random) return brain ? float_to_bfloat16(value) : float_to_float16(value);
    const std::uint64_t word = value_word(stream, d);
    return brain ? float_to_bfloat16(value, word) : float_to_float16(value, word);
  }

  __device__ __forceinline__ void load(std::int64_t unit, float* p) const {
    if (data_type == DataType::kFloat32) {
      load_unit<kWidth>(embedding, unit, p);
    } else if constexpr (kWidth == 4) {
      const auto halves = reinterpret_cast<const unsigned long long*>(embedding)[unit];
      for (int k = 0; k < 4; ++k) p[k] = widen(static_cast<std::uint16_t>(halves >> 16 * k));
    } else {
      p[0] = widen(reinterpret_cast<const std::uint16_t*>(embedding)[unit]);
    }
  }

  __device__ __forceinline__ void store(std::int64_t unit, const float* p) const {
    if (data_type == DataType::kFloat32) {
      store_unit<kWidth>(embedding, unit, p);
    } else if constexpr (kWidth == 4) {
      unsigned long long halves = 0;
      for (int k = 0; k < 4; ++k) {
        halves |= static_cast<unsigned long long>(narrow(p[k], 4 * unit + k)) << 16 * k;
      }
      reinterpret_cast<unsigned long long*>(embedding)[unit] = halves;
    } else {
      auto* halves = reinterpret_cast<std::uint16_t*>(embedding);
      halves[unit] = narrow(p[0], unit);
      if (unit + 1 == dim && dim % 2 != 0) halves[dim] = 0;  // the half word that is over
    }
  }

  // body(element, terms) for all elements; sums[t] = the row's sum of terms[t] in the fixed order.
  template <int kColumns, int kWrites, int kSums, typename Body>
  __device__ __forceinline__ void pass(float* sums, const Body& body) const {
    float parts[kSums > 0 ? kSums : 1][kWidth] = {};
    NESTPIPE_ROLLED
    for (std::int64_t unit = threadIdx.x; unit < dim / kWidth; unit += blockDim.x) {
      float p[kWidth], first[kWidth] = {}, second[kWidth] = {}, g[kWidth];
      load(unit, p);
      load_unit<kWidth>(grad, unit, g);
      if constexpr (kColumns > 0) load_unit<kWidth>(state, unit, first);
      if constexpr (kColumns > 1) load_unit<kWidth>(state + dim, unit, second);
      for (int k = 0; k < kWidth; ++k) {
        Element e = {p[k], first[k], second[k], g[k]};
        float terms[2] = {};
        body(e, terms);
        for (int t = 0; t < kSums; ++t) parts[t][k] += terms[t];
        p[k] = e.p, first[k] = e.first, second[k] = e.second;
      }
      if constexpr ((kWrites & kState) != 0 && kColumns > 0) store_unit<kWidth>(state, unit, first);
      if constexpr ((kWrites & kState) != 0 && kColumns > 1) {
        store_unit<kWidth>(state + dim, unit, second);
      }
      if constexpr ((kWrites & kEmbedding) != 0) store(unit, p);
    }
    for (int t = 0; t < kSums; ++t) sums[t] = sum_of_lanes<kWidth>(parts[t], lanes);
  }

  // For rules that need one pass.
  template <int kColumns, typename Body>
  __device__ __forceinline__ void each(const Body& body) const {
    pass<kColumns, kBoth, 0>(nullptr, [&](Element& e, float*) { body(e); });
  }
};

// Decay that is added to the gradient.
struct Decay {
  float factor;
  bool is_on;

  explicit Decay(const UpdateSettings& s)
      : factor(static_cast<float>(s.weight_decay)), is_on(s.weight_decay != 0.0) {}
  __device__ __forceinline__ float operator()(float g, float p) const {
    return is_on ? g + factor * p : g;
  }
};

// A rule: columns of state, whether there is a number for the whole row behind them, and whether it
// sums over the row.
template <int kColumns_, bool kScalar_, bool kSums_>
struct Rule {
  static constexpr int kColumns = kColumns_;
  static constexpr bool kScalar = kScalar_;
  static constexpr bool kSums = kSums_;
};

struct Sgd : Rule<0, false, false> {
  Decay decay;

  explicit Sgd(const UpdateSettings& s) : decay(s) {}
  template <typename Row>
  __device__ void operator()(Row& row) const {
    row.template each<0>([&](Element& e) { e.p -= row.lr * decay(e.g, e.p); });
  }
};

struct MomentumSgd : Rule<1, false, false> {
  Decay decay;
  float momentum, one_minus_dampening;
  bool nesterov;

  explicit MomentumSgd(const UpdateSettings& s)
      : decay(s),
        momentum(static_cast<float>(s.momentum)),
        one_minus_dampening(static_cast<float>(1.0 - s.dampening)),
        nesterov(s.nesterov) {}
  template <typename Row>
  __device__ void operator()(Row& row) const {
    const float keep = row.updates == 0 ? 0.0f : momentum;
    const float take = row.updates == 0 ? 1.0f : one_minus_dampening;
    row.template each<1>([&](Element& e) {
      const float g = decay(e.g, e.p);
      e.first = keep * e.first + take * g;
      e.p -= row.lr * (nesterov ? g + momentum * e.first : e.first);
    });
  }
};

struct Adagrad : Rule<1, false, false> {
  Decay decay;
  float eps;

  explicit Adagrad(const UpdateSettings& s) : decay(s), eps(static_cast<float>(s.eps)) {}
  template <typename Row>
  __device__ void operator()(Row& row) const {
    row.template each<1>([&](Element& e) {
      const float g = decay(e.g, e.p);
      e.first = e.first + g * g;
      e.p -= row.lr * (g / (std::sqrt(e.first) + eps));
    });
  }
};

struct RowWiseAdagrad : Rule<0, true, true> {
  Decay decay;
  float eps;

  explicit RowWiseAdagrad(const UpdateSettings& s) : decay(s), eps(static_cast<float>(s.eps)) {}
  template <typename Row>
  __device__ void operator()(Row& row) const {
    float squares;
    row.template pass<0, kNothing, 1>(&squares, [&](Element& e, float* terms) {
      const float g = decay(e.g, e.p);
      terms[0] = g * g;
    });
    row.scalar = row.scalar + squares / static_cast<float>(row.dim);
    const float scale = row.lr / (std::sqrt(row.scalar) + eps);
    row.template each<0>([&](Element& e) { e.p -= scale * decay(e.g, e.p); });
  }
};

// Settings that the rules with two moments share.
struct Moments {
  double beta1, beta2;
  bool by_row;
  BiasFactors of_step;
  float one_minus_beta1, one_minus_beta2, eps, decay;

  explicit Moments(const UpdateSettings& s)
      : beta1(s.beta1),
        beta2(s.beta2),
        by_row(s.bias_correction_by_row),
        of_step(s.beta1, s.beta2, s.step),
        one_minus_beta1(static_cast<float>(1.0 - s.beta1)),
        one_minus_beta2(static_cast<float>(1.0 - s.beta2)),
        eps(static_cast<float>(s.eps)),
        decay(static_cast<float>(s.weight_decay)) {}

  __device__ __forceinline__ BiasFactors factors(std::int32_t updates) const {
    return by_row ? BiasFactors(beta1, beta2, counted(updates)) : of_step;
  }
  __device__ __forceinline__ void move_first(Element& e, float g) const {
    e.first = e.first + (g - e.first) * one_minus_beta1;
  }
  __device__ __forceinline__ void move_both(Element& e, float g) const {
    move_first(e, g);
    e.second = e.second + (g * g - e.second) * one_minus_beta2;
  }
};

struct Adam : Rule<2, false, false>, Moments {
  Decay added;

  explicit Adam(const UpdateSettings& s) : Moments(s), added(s) {}
  template <typename Row>
  __device__ void operator()(Row& row) const {
    const float step_size = row.lr * factors(row.updates).both;
    row.template each<2>([&](Element& e) {
      move_both(e, added(e.g, e.p));
      e.p -= step_size * (e.first / (std::sqrt(e.second) + eps));
    });
  }
};

struct AdamW : Rule<2, false, false>, Moments {
  using Moments::Moments;

  template <typename Row>
  __device__ void operator()(Row& row) const {
    const BiasFactors bias = factors(row.updates);
    const float step_size = row.lr * bias.first, shrink = row.lr * decay;
    row.template each<2>([&](Element& e) {
      move_both(e, e.g);
      const float shrunk = e.p - shrink * e.p;
      e.p = shrunk - step_size * (e.first / (std::sqrt(e.second) * bias.second + eps));
    });
  }
};

struct RowWiseAdam : Rule<1, true, true>, Moments {
  using Moments::Moments;

  template <typename Row>
  __device__ void operator()(Row& row) const {
    const BiasFactors bias = factors(row.updates);
    float squares;
    row.template pass<0, kNothing, 1>(&squares,
                                      [&](Element& e, float* terms) { terms[0] = e.g * e.g; });
    const float mean = squares / static_cast<float>(row.dim);
    row.scalar = row.scalar + (mean - row.scalar) * one_minus_beta2;
    const float scale = (row.lr * bias.first) / (std::sqrt(row.scalar) * bias.second + eps);
    const float shrink = row.lr * decay;
    row.template each<1>([&](Element& e) {
      move_first(e, e.g);
      e.p = (e.p - shrink * e.p) - scale * e.first;
    });
  }
};

struct Lamb : Rule<2, false, true>, Moments {
  Decay added;

  explicit Lamb(const UpdateSettings& s) : Moments(s), added(s) {}
  // The direction follows from the moments, so it is worked out twice instead of kept.
  template <typename Row>
  __device__ void operator()(Row& row) const {
    const BiasFactors bias = factors(row.updates);
    const auto direction = [&](const Element& e) {
      return added((e.first * bias.first) / (std::sqrt(e.second) * bias.second + eps), e.p);
    };
    float squares[2];
    row.template pass<2, kState, 2>(squares, [&](Element& e, float* terms) {
      move_both(e, e.g);
      const float u = direction(e);
      terms[0] = e.p * e.p;
      terms[1] = u * u;
    });
    const float weight = std::sqrt(squares[0]), length = std::sqrt(squares[1]);
    const float ratio = weight > 0.0f && length > 0.0f ? weight / length : 1.0f;
    const float step_size = row.lr * ratio;
    row.template pass<2, kEmbedding, 0>(
        nullptr, [&](Element& e, float*) { e.p -= step_size * direction(e); });
  }
};

struct Ftrl : Rule<2, false, false> {
  Decay decay;
  float beta, l1, l2;

  explicit Ftrl(const UpdateSettings& s)
      : decay(s),
        beta(static_cast<float>(s.beta)),
        l1(static_cast<float>(s.l1)),
        l2(static_cast<float>(s.l2)) {}
  template <typename Row>
  __device__ void operator()(Row& row) const {
    if (row.lr < kSmallestFtrlRate) return;
    row.template each<2>([&](Element& e) {
      const float start = e.p, g = decay(e.g, start);
      const float n = e.second + g * g;
      const float q = (beta + std::sqrt(n)) / row.lr + l2;
      const float held = clamped(e.first, l1);
      const float c = start > 0.0f ? l1 : start < 0.0f ? -l1 : -held;
      const float t = start + (c - g) / q;
      e.second = n;
      e.first = -(t * q);
      e.p = t - clamped(t, l1 / q);
    });
  }
  static __device__ __forceinline__ float clamped(float value, float limit) {
    return value > limit ? limit : value < -limit ? -limit : value;
  }
};

// The numbers of a whole row are read by all its lanes before one of them writes.
template <typename Rule, int kWidth>
__global__ void __launch_bounds__(kRowThreads, 3) update_rows(UpdateArguments a, Rule rule) {
  const std::int64_t u = chosen_position();
  if (u >= a.num_rows || (a.mask != nullptr && a.mask[u] == 0)) return;
  Row<kWidth> row;
  row.embedding = a.rows + u * a.row_floats;
  row.state = row.embedding + embedding_words(a.data_type, a.dim);
  row.grad = a.grads + u * a.grad_stride;
  row.dim = a.dim;
  row.data_type = a.data_type;
  row.at_random = a.rounding.keys != nullptr;
  row.stream = row.at_random ? a.rounding.stream(u) : 0;
  row.lanes = lanes_of_row();
  row.lr = a.row_lr != nullptr ? a.row_lr[u] : a.lr;
  float* const scalar = row.state + Rule::kColumns * a.dim;
  float* const header = scalar + (Rule::kScalar ? 1 : 0);
  row.scalar = Rule::kScalar ? load_racing(scalar) : 0.0f;
  row.updates = static_cast<std::int32_t>(float_bits(load_racing(header)));
  rule(row);
  __syncwarp(row.lanes);
  if (threadIdx.x != 0) return;
  if (Rule::kScalar) store_racing(scalar, row.scalar);
  store_racing(header, bits_float(static_cast<std::uint32_t>(counted(row.updates))));
}

template <typename Rule>
void update(const UpdateArguments& a, const Rule& rule, Stream stream) {
  if (a.num_rows == 0) return;
  const int elements = a.data_type == DataType::kFloat32 ? 4 : 8;
  const bool vectors = a.dim % elements == 0 && aligned_16(a.rows, a.row_floats) &&
                       aligned_16(a.grads, a.grad_stride);
  const unsigned of_sum = vectors ? kLanesOfSum<4> : kLanesOfSum<1>;
  const dim3 threads = Rule::kSums ? dim3(of_sum, kRowThreads / of_sum)
                                   : row_block(vectors ? a.dim / kFloatsPerVector : a.dim);
  launch(vectors ? update_rows<Rule, 4> : update_rows<Rule, 1>, num_blocks(a.num_rows, threads.y),
         threads, 0, stream, a, rule);
}

}  // namespace

void row_update(const UpdateArguments& a, const UpdateSettings& s, Stream stream) {
  switch (s.rule) {
    case UpdateRule::kSgd:
      return s.momentum == 0.0 ? update(a, Sgd(s), stream) : update(a, MomentumSgd(s), stream);
    case UpdateRule::kAdagrad:
      return update(a, Adagrad(s), stream);
    case UpdateRule::kRowWiseAdagrad:
      return update(a, RowWiseAdagrad(s), stream);
    case UpdateRule::kAdam:
      return update(a, Adam(s), stream);
    case UpdateRule::kAdamW:
      return update(a, AdamW(s), stream);
    case UpdateRule::kRowWiseAdam:
      return update(a, RowWiseAdam(s), stream);
    case UpdateRule::kFtrl:
      return update(a, Ftrl(s), stream);
    case UpdateRule::kLamb:
      return update(a, Lamb(s), stream);
  }
  throw std::invalid_argument("row_update: unknown update rule " +
                              std::to_string(static_cast<std::int32_t>(s.rule)));
}

}  // namespace cuda
}  // namespace nestpipe
