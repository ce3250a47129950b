// Applies an update rule to buffer rows: chooses the rule once, then runs over the rows.
#include "nestpipe/row_update.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "nestpipe/request_line.h"
#include "nestpipe/row_tasks.h"
#include "update_rules.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kFloatsPerLine = 16;
constexpr std::int64_t kFloatsAhead = 2048;  // Of rows that are requested before they are updated.

std::int32_t read_updates(const float* header) {
  std::int32_t updates;
  std::memcpy(&updates, header, sizeof updates);
  return updates;
}

void write_updates(float* header, std::int32_t updates) {
  std::memcpy(header, &updates, sizeof updates);
}

// Updates rows begin .. end - 1 by gradients that stand `stride` apart.
template <typename Rule>
void update_rows(const UpdateArguments& a, std::int64_t num_state, const Rule& rule,
                 std::int64_t begin, std::int64_t end, const float* grads, std::int64_t stride) {
  const std::int64_t words = embedding_words(a.data_type, a.dim);
  const bool in_place = a.data_type == DataType::kFloat32;
  // scratch: [dim] for the rule, then [dim] for the widened embedding.
  std::vector<float> memory(static_cast<std::size_t>(in_place ? a.dim : 2 * a.dim));
  float* const scratch = memory.data();
  const auto update = [&](std::int64_t u) {
    float* row = a.row(u);
    float* embedding = in_place ? row : scratch + a.dim;
    float* state = row + words;
    float* header = state + num_state;
    const std::int32_t updates = read_updates(header);
    const float lr = a.row_lr != nullptr ? a.row_lr[u] : a.lr;
    if (!in_place) unpack_embedding(a.data_type, row, a.dim, embedding);
    rule(RowParts{embedding, state, grads + (u - begin) * stride, scratch, a.dim, lr, updates});
    if (!in_place && a.rounding.keys == nullptr) {
      pack_embedding(a.data_type, embedding, a.dim, row);
    } else if (!in_place) {
      pack_embedding(a.data_type, embedding, a.dim, a.rounding.stream(u), row);
    }
    if (updates < std::numeric_limits<std::int32_t>::max()) write_updates(header, updates + 1);
  };
  // Long rows are several arrays side by side, each too short for the hardware's prefetcher.
  const std::int64_t used = words + num_state + 1;
  const auto request = [&](std::int64_t u) {
    const float* const row = a.row(u);
    for (std::int64_t d = 0; d < used; d += kFloatsPerLine) request_line_early(row + d);
    const float* const grad = grads + (u - begin) * stride;
    for (std::int64_t d = 0; d < a.dim; d += kFloatsPerLine) request_line_early(grad + d);
  };
  const std::int64_t ahead = std::max<std::int64_t>(1, kFloatsAhead / used);
  for (std::int64_t u = begin; u < end; ++u) {
    if (a.pointers == nullptr && u + ahead < end) request(u + ahead);
    if (a.mask == nullptr || a.mask[u] != 0) update(u);
  }
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

namespace {

// Calls body(rule) with the settings' rule.
template <typename Body>
void with_rule(const UpdateSettings& s, const Body& body) {
  with_flag(s.weight_decay != 0.0, [&](auto decay) {
    switch (s.rule) {
      case UpdateRule::kSgd:
        if (s.momentum == 0.0) return body(Sgd<decay.value>(s));
        return with_flag(s.nesterov,
                         [&](auto nesterov) { body(MomentumSgd<decay.value, nesterov.value>(s)); });
      case UpdateRule::kAdagrad:
        return body(Adagrad<decay.value>(s));
      case UpdateRule::kRowWiseAdagrad:
        return body(RowWiseAdagrad<decay.value>(s));
      case UpdateRule::kAdam:
        return body(Adam<decay.value>(s));
      case UpdateRule::kAdamW:
        return body(AdamW(s));
      case UpdateRule::kRowWiseAdam:
        return body(RowWiseAdam(s));
      case UpdateRule::kFtrl:
        return body(Ftrl<decay.value>(s));
      case UpdateRule::kLamb:
        return body(Lamb<decay.value>(s));
    }
  });
}

}  // namespace

void row_update(const UpdateArguments& a, const UpdateSettings& s) {
  const std::int64_t num_state = state_floats(s, a.dim);
  with_rule(s, [&](const auto& rule) {
    parallel_ranges(a.num_rows, rows_per_task(a.row_floats),
                    [&](std::int64_t begin, std::int64_t end) {
                      update_rows(a, num_state, rule, begin, end, a.grads + begin * a.grad_stride,
                                  a.grad_stride);
                    });
  });
}

UpdateRows row_updater(const UpdateArguments& a, const UpdateSettings& s) {
  const std::int64_t num_state = state_floats(s, a.dim);
  UpdateRows updater;
  with_rule(s, [&](const auto& rule) {
    updater = [&a, num_state, rule](std::int64_t begin, std::int64_t end, const float* grads) {
      update_rows(a, num_state, rule, begin, end, grads, a.dim);
    };
  });
  return updater;
}

}  // namespace nestpipe
