// Pooling, row updates and row movement without Python: values against plain loops, any thread
// count, several callers at once. Meant to run under AddressSanitizer, UndefinedBehaviorSanitizer
// and ThreadSanitizer too.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "nestpipe/finite_rows.h"
#include "nestpipe/gather_rows.h"
#include "nestpipe/lane_sum.h"
#include "nestpipe/lookup_pool.h"
#include "nestpipe/mean_sources.h"
#include "nestpipe/parallel.h"
#include "nestpipe/row_sums.h"
#include "nestpipe/row_sync.h"
#include "nestpipe/row_update.h"
#include "nestpipe/scatter_add_rows.h"
#include "nestpipe/take_rows.h"
#include "nestpipe/wire_rows.h"

namespace {

using namespace nestpipe;

std::vector<float> random_floats(std::int64_t size, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<float> values(size);
  for (float& value : values) value = static_cast<float>(generator() % 2001) / 1000.0f - 1.0f;
  return values;
}

// Four segments (sum, mean, max, none) over few rows, so that some row has several blocks of
// occurrences.
struct Case {
  static constexpr std::int64_t kRows = 300;
  static constexpr std::int64_t kDim = 19;
  static constexpr std::int64_t kBags = 1500;

  std::vector<float> rows = random_floats(kRows * kDim, 1);
  std::vector<float> grads = random_floats(kBags * kDim, 2);
  std::vector<std::int32_t> slots;
  std::vector<std::int64_t> offsets = {0};

  Case() {
    std::mt19937 generator(3);
    for (std::int64_t bag = 0; bag < kBags; ++bag) {
      const std::int64_t length = bag < 1200 ? static_cast<std::int64_t>(generator() % 11) : 1;
      for (std::int64_t j = 0; j < length; ++j) {
        const auto draw = static_cast<std::int32_t>(generator() % 1000);
        slots.push_back(draw < 600 ? 7 : draw < 650 ? -1 : draw % static_cast<int>(kRows));
      }
      offsets.push_back(static_cast<std::int64_t>(slots.size()));
    }
  }

  RowMatrix matrix() const { return {rows.data(), kRows, kDim, kDim}; }

  BagList bags() const {
    BagList list;
    list.slots = slots.data();
    list.num_occurrences = static_cast<std::int64_t>(slots.size());
    list.bag_offsets = offsets.data();
    list.num_bags = kBags;
    list.segment_bags = {0, 400, 800, 1200, kBags};
    list.segment_modes = {0, 1, 2, 3};
    return list;
  }

  std::vector<float> forward() const {
    std::vector<float> out(kBags * kDim, NAN);
    const BagList list = bags();
    std::vector<SegmentOutput> outs;
    for (int s = 0; s < 4; ++s) outs.push_back({out.data() + list.segment_bags[s] * kDim, kDim});
    lookup_pool_forward(matrix(), list, outs);
    return out;
  }

  std::vector<float> backward() const {
    std::vector<float> accumulator(kRows * kDim, 0.0f);
    const BagList list = bags();
    std::vector<SegmentGradient> all;
    for (int s = 0; s < 4; ++s) all.push_back({grads.data() + list.segment_bags[s] * kDim, kDim});
    lookup_pool_backward(matrix(), list, all, accumulator.data());
    return accumulator;
  }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void test_sums_against_loops() {
  const Case c;
  const std::vector<float> out = c.forward();
  for (std::int64_t bag = 0; bag < 400; ++bag) {
    for (std::int64_t d = 0; d < Case::kDim; ++d) {
      float sum = 0.0f;
      for (std::int64_t j = c.offsets[bag]; j < c.offsets[bag + 1]; ++j) {
        if (c.slots[j] >= 0) sum += c.rows[c.slots[j] * Case::kDim + d];
      }
      CHECK_EQUAL(out[bag * Case::kDim + d], sum);
    }
  }
  for (const float value : out) CHECK_EQUAL(std::isfinite(value), true);
}

void test_rows_found_as_they_are_needed() {
  const Case c;
  const std::vector<float> truth = c.forward();
  BagList list = c.bags();
  list.own_rows = true;
  std::vector<float> out(Case::kBags * Case::kDim, NAN);
  std::vector<SegmentOutput> outs;
  for (int s = 0; s < 4; ++s) {
    outs.push_back({out.data() + list.segment_bags[s] * Case::kDim, Case::kDim});
  }
  const auto find = [&](std::int64_t begin, std::int64_t end, const float** rows) {
    for (std::int64_t j = begin; j < end; ++j) {
      rows[j - begin] = c.slots[j] < 0 ? nullptr : c.rows.data() + c.slots[j] * Case::kDim;
    }
    return true;
  };
  lookup_pool_by_ranges(list, Case::kDim, outs, find);
  CHECK_EQUAL(same_bits(out, truth), true);
  bool refused = false;
  try {
    lookup_pool_forward(c.matrix(), list, outs);
  } catch (const std::invalid_argument& error) {
    refused = std::strstr(error.what(), "without slots, expected a row for each of") != nullptr;
  }
  CHECK_EQUAL(refused, true);
}

void test_instructions_do_not_change_bits() {
  const Case c;
  const std::vector<float> out = c.forward();
  const std::vector<float> sums = c.backward();
  use_portable_sums(true);
  CHECK_EQUAL(same_bits(c.forward(), out), true);
  CHECK_EQUAL(same_bits(c.backward(), sums), true);
  use_portable_sums(false);
}

void test_threads_and_callers_do_not_change_bits() {
  const Case c;
  set_num_threads(1);
  const std::vector<float> out = c.forward();
  const std::vector<float> gradient = c.backward();
  for (const int threads : {2, 4}) {
    set_num_threads(threads);
    std::vector<std::thread> callers;
    std::vector<int> right(3, 0);
    for (int caller = 0; caller < 3; ++caller) {
      callers.emplace_back([&, caller] {
        right[caller] = same_bits(c.forward(), out) && same_bits(c.backward(), gradient);
      });
    }
    for (std::thread& caller : callers) caller.join();
    for (const int is_right : right) CHECK_EQUAL(is_right, 1);
  }
}

void test_bad_slots_change_nothing() {
  Case c;
  c.slots.back() = Case::kRows;
  std::vector<float> accumulator(Case::kRows * Case::kDim, 0.0f);
  const std::vector<SegmentGradient> nothing(4, {nullptr, 0});
  CHECK_THROWS(std::out_of_range,
               lookup_pool_backward(c.matrix(), c.bags(), nothing, accumulator.data()));
  CHECK_EQUAL(
      std::all_of(accumulator.begin(), accumulator.end(), [](float x) { return x == 0.0f; }), true);
}

void test_lane_sum_order() {
  const std::vector<float> values = random_floats(37, 4);
  float lanes[16] = {};
  for (int d = 0; d < 37; ++d) lanes[d % 16] += values[d];
  for (int half = 8; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  CHECK_EQUAL(lane_sum(37, [&](std::int64_t d) { return values[d]; }), lanes[0]);
  CHECK_EQUAL(lane_sum(0, [](std::int64_t) { return 1.0f; }), 0.0f);
}

// Alike at any number of threads, with the instructions that every processor has and with others.
void test_updates_of_every_rule(std::int64_t dim) {
  constexpr std::int64_t kRows = 3000;
  const std::vector<float> grads = random_floats(kRows * dim, 5);
  UpdateSettings common;
  common.eps = 1e-8;
  common.beta1 = 0.9;
  common.beta2 = 0.999;
  common.beta = 1.0;
  std::vector<UpdateSettings> cases;
  for (std::int32_t code = 0; code <= static_cast<std::int32_t>(UpdateRule::kLamb); ++code) {
    for (const double decay : {0.0, 0.25}) {
      UpdateSettings s = common;
      s.rule = static_cast<UpdateRule>(code);
      s.weight_decay = decay;
      cases.push_back(s);
    }
  }
  cases.push_back(common);
  cases.back().momentum = 0.9;
  cases.push_back(cases.back());
  cases.back().nesterov = true;
  for (const UpdateSettings& s : cases) {
    const std::int64_t row_floats = dim + state_floats(s, dim) + 1;
    std::vector<std::vector<float>> results;
    for (const int threads : {1, 4}) {
      set_num_threads(threads);
      use_portable_rules(threads == 1);
      std::vector<float> rows(kRows * row_floats, 0.0f);
      for (std::int64_t u = 0; u < kRows; ++u) {
        std::copy_n(grads.data() + (kRows - 1 - u) * dim, dim, rows.data() + u * row_floats);
      }
      UpdateArguments a;
      a.rows = rows.data();
      a.num_rows = kRows;
      a.row_floats = row_floats;
      a.dim = dim;
      a.grads = grads.data();
      a.grad_stride = dim;
      a.lr = 0.5f;
      row_update(a, s);
      results.push_back(rows);
    }
    CHECK_EQUAL(same_bits(results[0], results[1]), true);
    std::int32_t updates;
    std::memcpy(&updates, results[0].data() + row_floats - 1, sizeof updates);
    CHECK_EQUAL(updates, 1);
    CHECK_EQUAL(results[0][3] != 0.0f, true);
    if (s.rule == UpdateRule::kSgd && s.weight_decay == 0.0 && s.momentum == 0.0) {
      CHECK_EQUAL(results[0][3], grads[(kRows - 1) * dim + 3] - 0.5f * grads[3]);
    }
  }
  use_portable_rules(false);
  CHECK_EQUAL(integer_power(0.5, 10), 1.0 / 1024.0);
}

void test_row_movement() {
  constexpr std::int64_t kRows = 2000;
  constexpr std::int64_t kFloats = 48;
  set_num_threads(4);
  const std::vector<float> source = random_floats(kRows * kFloats, 6);
  std::vector<std::int64_t> index(kRows);
  for (std::int64_t j = 0; j < kRows; ++j) index[j] = kRows - 1 - j;
  std::vector<float> target(kRows * kFloats, 0.0f);
  row_sync(
      {source.data(), kRows, target.data(), kRows, kFloats, index.data(), index.data(), kRows});
  CHECK_EQUAL(same_bits(source, target), true);
  std::vector<float> gathered(kRows * 20);
  gather_rows({source.data(), kRows, kFloats, 20, index.data(), kRows, gathered.data(), 20});
  CHECK_EQUAL(gathered[5], source[(kRows - 1) * kFloats + 5]);
  ScatterRows scatter = {target.data(), kRows, kFloats,         20,
                         index.data(),  kRows, gathered.data(), 20};
  scatter_add_rows(scatter);
  CHECK_EQUAL(target[0], source[0] + source[0]);
  CHECK_EQUAL(target[20], source[20]);
  zero_rows(scatter);
  CHECK_EQUAL(target[0], 0.0f);
  scatter_rows(scatter);
  CHECK_EQUAL(same_bits(source, target), true);
  CHECK_EQUAL(all_finite(target.data(), kRows, kFloats, kFloats), true);
  target[777 * kFloats + 47] = INFINITY;
  std::vector<std::uint8_t> finite(kRows, 2);
  finite_rows(target.data(), kRows, kFloats, kFloats, finite.data());
  for (std::int64_t u = 0; u < kRows; ++u) CHECK_EQUAL(int{finite[u]}, u == 777 ? 0 : 1);
  CHECK_EQUAL(all_finite(target.data(), kRows, kFloats, kFloats), false);
  index[3] = index[4];
  CHECK_THROWS(std::invalid_argument, zero_rows(scatter));
}

void test_mean_sources() {
  constexpr std::int64_t kRows = 2000;
  constexpr std::int64_t kDim = 33;
  // The first source has every row, the second every other one, downwards.
  std::vector<std::int64_t> slot(kRows + kRows / 2);
  for (std::int64_t u = 0; u < kRows; ++u) slot[u] = u;
  for (std::int64_t j = 0; j < kRows / 2; ++j) slot[kRows + j] = kRows - 2 - 2 * j;
  const auto size = static_cast<std::int64_t>(slot.size());
  std::vector<std::int64_t> starts(kRows + 1);
  std::vector<std::int64_t> order(slot.size());
  entries_by_row(slot.data(), size, kRows, starts.data(), order.data());
  std::vector<float> boxes = random_floats(size * kDim, 8);
  boxes[5 * kDim + 32] = NAN;
  std::vector<float> total(kRows * kDim, 7.0f);
  std::vector<std::uint8_t> countable(kRows, 1);
  const std::vector<std::int64_t> ends = {kRows, size};
  const std::vector<float> divisors = {1.0f, 3.0f};
  MeanSources a;
  a.total = total.data();
  a.countable = countable.data();
  a.num_rows = kRows;
  a.dim = kDim;
  a.boxes = boxes.data();
  a.size = size;
  a.starts = starts.data();
  a.order = order.data();
  a.source_ends = ends.data();
  a.divisors = divisors.data();
  a.num_sources = 2;
  a.limit = INFINITY;
  mean_sources(a);
  const float* second = boxes.data() + (kRows + kRows / 2 - 1) * kDim;
  CHECK_EQUAL(total[0], (boxes[0] + second[0] / 3.0f) / 2.0f);
  CHECK_EQUAL(total[kDim], boxes[kDim] / 2.0f);
  for (std::int64_t u = 0; u < kRows; ++u) CHECK_EQUAL(int{countable[u]}, u == 5 ? 0 : 1);
  std::vector<std::int64_t> index(kRows);
  for (std::int64_t j = 0; j < kRows; ++j) index[j] = kRows - 1 - j;
  std::vector<float> taken(kRows * kDim);
  std::vector<float> peaks(kRows);
  take_rows({boxes.data(), size, kDim, kDim, index.data(), kRows, taken.data(), peaks.data()});
  CHECK_EQUAL(std::isnan(peaks[kRows - 1 - 5]), true);
  CHECK_EQUAL(taken[0], total[(kRows - 1) * kDim] * 2.0f);
  CHECK_EQUAL(boxes[5 * kDim + 32], 0.0f);
  index[3] = index[4];
  a.rows = index.data();
  a.num_chosen = kRows;
  CHECK_THROWS(std::invalid_argument, mean_sources(a));
}

void test_wire_formats() {
  constexpr std::int64_t kRows = 3000;
  constexpr WireFormat kFormats[] = {WireFormat::kFloat32, WireFormat::kBFloat16,
                                     WireFormat::kFloat16, WireFormat::kInt8};
  constexpr float kErrors[] = {0.0f, 1.0f / 256, 1.0f / 2048, 0.51f / 127};  // Of values up to 1.
  for (const std::int64_t dim : {1, 7, 8, 19, 129}) {
    const std::vector<float> rows = random_floats(kRows * (dim + 2), 8);
    for (int f = 0; f < 4; ++f) {
      const auto bytes = static_cast<std::size_t>(wire_row_bytes(kFormats[f], dim));
      std::vector<std::vector<float>> results;
      for (const int threads : {1, 4}) {
        set_num_threads(threads);
        std::vector<std::uint8_t> message(bytes * kRows + 1);  // The last byte must stay.
        message.back() = 99;
        std::vector<float> back(kRows * dim);
        encode_rows(kFormats[f], rows.data(), kRows, dim + 2, dim, message.data());
        decode_rows(kFormats[f], message.data(), kRows, dim, back.data());
        CHECK_EQUAL(static_cast<int>(message.back()), 99);
        results.push_back(back);
      }
      CHECK_EQUAL(same_bits(results[0], results[1]), true);
      float worst = 0.0f;
      for (std::int64_t u = 0; u < kRows; ++u) {
        for (std::int64_t d = 0; d < dim; ++d) {
          worst = std::max(worst, std::abs(results[0][u * dim + d] - rows[u * (dim + 2) + d]));
        }
      }
      CHECK_EQUAL(worst <= kErrors[f], true);
    }
  }
}

}  // namespace

int main() {
  test_sums_against_loops();
  test_rows_found_as_they_are_needed();
  test_instructions_do_not_change_bits();
  test_threads_and_callers_do_not_change_bits();
  test_bad_slots_change_nothing();
  test_lane_sum_order();
  for (const std::int64_t dim : {4, 8, 15, 17, 64}) test_updates_of_every_rule(dim);
  test_row_movement();
  test_mean_sources();
  test_wire_formats();
  return nestpipe::failures() == 0 ? 0 : 1;
}
