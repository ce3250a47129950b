// Applies an update rule to buffer rows: chooses rule and instruction set once, then runs over the
// rows.
#include "nestpipe/row_update.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "nestpipe/lane_sum.h"
#include "nestpipe/request_line.h"
#include "nestpipe/row_tasks.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kFloatsPerLine = 16;
constexpr std::int64_t kFloatsAhead = 2048;  // Of rows that are requested before they are updated.
// Rows of more floats are left to the hardware's prefetcher.
constexpr std::int64_t kMostRequested = 1024;

std::int32_t read_updates(const float* header) {
  std::int32_t updates;
  std::memcpy(&updates, header, sizeof updates);
  return updates;
}

void write_updates(float* header, std::int32_t updates) {
  std::memcpy(header, &updates, sizeof updates);
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

using UpdateRange = std::function<void(std::int64_t begin, std::int64_t end, const float* grads,
                                       std::int64_t stride)>;

std::atomic<bool> portable_only{false};

namespace portable {
#include "update_rules.inc"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#include "update_rules.inc"
}  // namespace avx2
#pragma GCC pop_options
#endif

#if defined(__x86_64__)
// Sums of rows shorter than their lanes pass through memory, where long vectors wait for parts.
bool has_short_sums(const UpdateSettings& s, std::int64_t dim) {
  return dim < kSumLanes && (s.rule == UpdateRule::kRowWiseAdagrad ||
                             s.rule == UpdateRule::kRowWiseAdam || s.rule == UpdateRule::kLamb);
}
#endif

UpdateRange range_updater(const UpdateArguments& a, const UpdateSettings& s) {
#if defined(__x86_64__)
  if (!has_short_sums(s, a.dim) && __builtin_cpu_supports("avx2") &&
      !portable_only.load(std::memory_order_relaxed)) {
    return avx2::range_updater(a, s);
  }
#endif
  return portable::range_updater(a, s);
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

void row_update(const UpdateArguments& a, const UpdateSettings& s) {
  const UpdateRange update = range_updater(a, s);
  parallel_ranges(a.num_rows, rows_per_task(a.row_floats),
                  [&](std::int64_t begin, std::int64_t end) {
                    update(begin, end, a.grads + begin * a.grad_stride, a.grad_stride);
                  });
}

UpdateRows row_updater(const UpdateArguments& a, const UpdateSettings& s) {
  return
      [&a, update = range_updater(a, s)](std::int64_t begin, std::int64_t end, const float* grads) {
        update(begin, end, grads, a.dim);
      };
}

void use_portable_rules(bool portable) { portable_only.store(portable, std::memory_order_relaxed); }

}  // namespace nestpipe
