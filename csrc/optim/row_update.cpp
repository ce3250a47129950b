// Applies an update rule to buffer rows: chooses the rule once, then runs over the rows.
#include "nestpipe/row_update.h"

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "nestpipe/row_tasks.h"
#include "update_rules.h"

namespace nestpipe {
namespace {

std::int32_t read_updates(const float* header) {
  std::int32_t updates;
  std::memcpy(&updates, header, sizeof updates);
  return updates;
}

void write_updates(float* header, std::int32_t updates) {
  std::memcpy(header, &updates, sizeof updates);
}

template <typename Rule>
void update_rows(const UpdateArguments& a, std::int64_t num_state, const Rule& rule) {
  const std::int64_t words = embedding_words(a.data_type, a.dim);
  const bool in_place = a.data_type == DataType::kFloat32;
  // scratch: [dim] for the rule, then [dim] for the widened embedding.
  const auto update = [&](std::int64_t u, float* scratch) {
    float* row = a.rows + u * a.row_floats;
    float* embedding = in_place ? row : scratch + a.dim;
    float* state = row + words;
    float* header = state + num_state;
    const std::int32_t updates = read_updates(header);
    const float lr = a.row_lr != nullptr ? a.row_lr[u] : a.lr;
    if (!in_place) unpack_embedding(a.data_type, row, a.dim, embedding);
    rule(RowParts{embedding, state, a.grads + u * a.grad_stride, scratch, a.dim, lr, updates});
    if (!in_place && a.rounding.keys == nullptr) {
      pack_embedding(a.data_type, embedding, a.dim, row);
    } else if (!in_place) {
      pack_embedding(a.data_type, embedding, a.dim, a.rounding.stream(u), row);
    }
    if (updates < std::numeric_limits<std::int32_t>::max()) write_updates(header, updates + 1);
  };
  parallel_ranges(
      a.num_rows, rows_per_task(a.row_floats), [&](std::int64_t begin, std::int64_t end) {
        std::vector<float> scratch(static_cast<std::size_t>(in_place ? a.dim : 2 * a.dim));
        for (std::int64_t u = begin; u < end; ++u) {
          if (a.mask == nullptr || a.mask[u] != 0) update(u, scratch.data());
        }
      });
}

// Calls body(std::true_type) or body(std::false_type).
template <typename Body>
void with_flag(bool flag, const Body& body) {
  if (flag) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

}  // namespace

std::int64_t state_floats(const UpdateSettings& settings, std::int64_t dim) {
  switch (settings.rule) {
    case UpdateRule::kSgd:
      return settings.momentum != 0.0 ? dim : 0;
    case UpdateRule::kAdagrad:
      return dim;
    case UpdateRule::kRowWiseAdagrad:
      return 1;
    case UpdateRule::kAdam:
    case UpdateRule::kAdamW:
    case UpdateRule::kFtrl:
    case UpdateRule::kLamb:
      return 2 * dim;
    case UpdateRule::kRowWiseAdam:
      return dim + 1;
  }
  throw std::invalid_argument("row_update: unknown update rule " +
                              std::to_string(static_cast<std::int32_t>(settings.rule)));
}

double integer_power(double base, std::int64_t exponent) {
  double power = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0) power *= base;
    base *= base;
  }
  return power;
}

void row_update(const UpdateArguments& a, const UpdateSettings& s) {
  const std::int64_t num_state = state_floats(s, a.dim);
  with_flag(s.weight_decay != 0.0, [&](auto decay) {
    switch (s.rule) {
      case UpdateRule::kSgd:
        if (s.momentum == 0.0) return update_rows(a, num_state, Sgd<decay.value>(s));
        return with_flag(s.nesterov, [&](auto nesterov) {
          update_rows(a, num_state, MomentumSgd<decay.value, nesterov.value>(s));
        });
      case UpdateRule::kAdagrad:
        return update_rows(a, num_state, Adagrad<decay.value>(s));
      case UpdateRule::kRowWiseAdagrad:
        return update_rows(a, num_state, RowWiseAdagrad<decay.value>(s));
      case UpdateRule::kAdam:
        return update_rows(a, num_state, Adam<decay.value>(s));
      case UpdateRule::kAdamW:
        return update_rows(a, num_state, AdamW(s));
      case UpdateRule::kRowWiseAdam:
        return update_rows(a, num_state, RowWiseAdam(s));
      case UpdateRule::kFtrl:
        return update_rows(a, num_state, Ftrl<decay.value>(s));
      case UpdateRule::kLamb:
        return update_rows(a, num_state, Lamb<decay.value>(s));
    }
  });
}

}  // namespace nestpipe
