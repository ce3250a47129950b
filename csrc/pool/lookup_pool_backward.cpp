// Backward: gradients of rows, summed per row in the fixed order; and gradients of per-sample
// weights.
//
// A stable counting sort by slot lists each row's occurrences in ascending order. Rows are then
// independent. A row with more than one block of occurrences (a hot key) has its blocks summed as
// tasks of their own and added afterwards in order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <type_traits>

#include "bag_checks.h"
#include "nestpipe/lane_sum.h"
#include "nestpipe/lookup_pool.h"
#include "nestpipe/row_sums.h"
#include "nestpipe/row_tasks.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kAhead = 8;
constexpr std::int64_t kRowsAtOnce = 16;            // whose gradients are handed over together
constexpr std::int64_t kOccurrencesPerPart = 8192;  // of sorting, at least
constexpr std::int64_t kMaxParts = 8;
constexpr std::uint32_t kNoWinner = 0xFFFFFFFFu;  // check_bags keeps occurrences below this

// What an occurrence needs to know of its bag.
struct Bag {
  const float* grad;  // null: gradient 0
  PoolMode mode;
  float count;             // non-padding occurrences
  std::uint32_t* winners;  // kMax: [dim] occurrence that supplied the maximum
};

struct Occurrence {
  std::uint32_t bag;
  std::uint32_t position;  // in the list of slots
};

class Backward {
 public:
  Backward(const RowMatrix& rows, const BagList& bags, const std::vector<SegmentGradient>& grads)
      : rows_(rows), list_(bags), bags_(bags.num_bags) {
    std::int64_t max_bags = 0;
    bool has_mean = false;
    bool has_sum = false;
    const auto describe = [&](std::int64_t segment, std::int64_t bag) {
      const SegmentGradient& grad = grads[segment];
      const std::int64_t row = bag - bags.segment_bags[segment];
      const auto mode = static_cast<PoolMode>(bags.segment_modes[segment]);
      bags_[bag] = {grad.data == nullptr ? nullptr : grad.data + row * grad.stride, mode, 0.0f,
                    nullptr};
      if (mode == PoolMode::kMax && grad.data != nullptr) ++max_bags;
      (mode == PoolMode::kMean ? has_mean : has_sum) = true;
    };
    for_each_bag(bags, 0, bags.num_bags, describe);
    is_uniform_ = max_bags == 0 && !(has_mean && has_sum);
    weighing_ = has_mean                  ? Weighing::kOver
                : bags.weights != nullptr ? Weighing::kTimes
                                          : Weighing::kPlain;
    add_rows_ = add_rows_function(weighing_);
    if (max_bags > 0 && rows.is_null() && rows.num_rows > 0) {
      throw std::invalid_argument("lookup_pool: pooling max needs `rows` in backward, got none");
    }
    winners_.assign(max_bags * rows.dim, kNoWinner);
    std::uint32_t* next = winners_.data();
    for (Bag& bag : bags_) {
      if (bag.mode != PoolMode::kMax || bag.grad == nullptr) continue;
      bag.winners = next;
      next += rows.dim;
    }
  }

  template <typename Slots>
  void run(Slots slots, const UseGradients& use) {
    describe_bags(slots);
    sort_occurrences(slots);
    sum_hot_blocks();
    const std::int64_t dim = rows_.dim;
    const auto work_before = [&](std::int64_t u) { return std::int64_t{starts_[u]} + u; };
    parallel_by_work(rows_.num_rows, rows_per_task(dim), work_before,
                     [&](std::int64_t begin, std::int64_t end) {
                       std::vector<float> gradients((kRowsAtOnce + 1) * dim);
                       float* const block = gradients.data() + kRowsAtOnce * dim;
                       for (std::int64_t u = begin; u < end; u += kRowsAtOnce) {
                         const std::int64_t last = std::min(u + kRowsAtOnce, end);
                         for (std::int64_t v = u; v < last; ++v) {
                           request_row(v + kRowsAtOnce);
                           row_gradient(v, gradients.data() + (v - u) * dim, block);
                         }
                         use(u, last, gradients.data());
                       }
                     });
  }

  bool occurs(std::int64_t u) const { return starts_[u] != starts_[u + 1]; }

 private:
  // Rows that are anywhere will be updated where they are.
  void request_row(std::int64_t u) const {
    if (rows_.pointers == nullptr || u >= rows_.num_rows) return;
    prefetch_row(rows_.pointers[u], std::max(rows_.dim, rows_.stride));
  }

  // Counts for mean, winners for max.
  template <typename Slots>
  void describe_bags(Slots slots) {
    const auto work_before = [&](std::int64_t bag) { return list_.bag_offsets[bag] + bag; };
    parallel_by_work(list_.num_bags, rows_per_task(rows_.dim), work_before,
                     [&](std::int64_t begin, std::int64_t end) {
                       std::vector<float> maxima(winners_.empty() ? 0 : rows_.dim);
                       for (std::int64_t bag = begin; bag < end; ++bag) {
                         describe_bag(slots, bag, maxima.data());
                       }
                     });
  }

  template <typename Slots>
  void describe_bag(Slots slots, std::int64_t bag_index, float* maxima) {
    Bag& bag = bags_[bag_index];
    const std::int64_t begin = list_.bag_offsets[bag_index];
    const std::int64_t end = list_.bag_offsets[bag_index + 1];
    if (bag.mode == PoolMode::kMean) {
      std::int64_t count = 0;
      for (std::int64_t j = begin; j < end; ++j) count += slots[j] >= 0;
      bag.count = static_cast<float>(count);
    } else if (bag.winners != nullptr) {
      bool is_empty = true;
      for (std::int64_t j = begin; j < end; ++j) {
        if (slots[j] < 0) continue;
        if (j + kAhead < list_.num_occurrences && slots[j + kAhead] >= 0) {
          prefetch_row(rows_.row(slots[j + kAhead]), rows_.dim);
        }
        const float* candidate = rows_.row(slots[j]);
        if (is_empty) {
          std::copy_n(candidate, rows_.dim, maxima);
          std::fill_n(bag.winners, rows_.dim, static_cast<std::uint32_t>(j));
          is_empty = false;
        } else {
          take_maxima(candidate, static_cast<std::uint32_t>(j), maxima, bag.winners);
        }
      }
    }
  }

  // Without branches, so that it vectorizes: the outcome of each comparison is a coin toss.
  void take_maxima(const float* __restrict candidate, std::uint32_t position,
                   float* __restrict maxima, std::uint32_t* __restrict winners) const {
    for (std::int64_t d = 0; d < rows_.dim; ++d) {
      const bool wins = beats_maximum(candidate[d], maxima[d]);
      maxima[d] = wins ? candidate[d] : maxima[d];
      winners[d] = wins ? position : winners[d];
    }
  }

  // A stable counting sort by slot. Each part of the bags has counts of its own, so that parts are
  // independent; what comes out does not depend on how many there are.
  template <typename Slots>
  void sort_occurrences(Slots slots) {
    const std::int64_t size = rows_.num_rows;
    const std::int64_t num_parts =
        std::max<std::int64_t>(1, std::min({std::int64_t{num_threads()}, kMaxParts,
                                            list_.num_occurrences / kOccurrencesPerPart}));
    const std::vector<std::int64_t> cuts = cut_bags(num_parts);
    std::vector<std::vector<std::uint32_t>> places(num_parts);
    parallel_tasks(num_parts, [&](std::int64_t part) {
      places[part].assign(size, 0);
      const std::int64_t end = list_.bag_offsets[cuts[part + 1]];
      for (std::int64_t j = list_.bag_offsets[cuts[part]]; j < end; ++j) {
        if (slots[j] >= 0) ++places[part][slots[j]];
      }
    });
    starts_.resize(size + 1);
    std::uint32_t total = 0;
    for (std::int64_t u = 0; u < size; ++u) {
      starts_[u] = total;
      for (std::int64_t part = 0; part < num_parts; ++part) {
        const std::uint32_t count = places[part][u];
        places[part][u] = total;
        total += count;
      }
    }
    starts_[size] = total;
    num_sorted_ = total;
    sorted_.reset(new Occurrence[total]);
    parallel_tasks(num_parts, [&](std::int64_t part) {
      std::uint32_t* const place = places[part].data();
      for (std::int64_t bag = cuts[part]; bag < cuts[part + 1]; ++bag) {
        for (std::int64_t j = list_.bag_offsets[bag]; j < list_.bag_offsets[bag + 1]; ++j) {
          if (slots[j] < 0) continue;
          sorted_[place[slots[j]]++] = {static_cast<std::uint32_t>(bag),
                                        static_cast<std::uint32_t>(j)};
        }
      }
    });
  }

  // Bags in `num_parts` runs with about as many occurrences each.
  std::vector<std::int64_t> cut_bags(std::int64_t num_parts) const {
    std::vector<std::int64_t> cuts = {0};
    for (std::int64_t part = 1; part < num_parts; ++part) {
      const std::int64_t goal = list_.num_occurrences / num_parts * part;
      const std::int64_t* const found =
          std::lower_bound(list_.bag_offsets, list_.bag_offsets + list_.num_bags, goal);
      cuts.push_back(found - list_.bag_offsets);
    }
    cuts.push_back(list_.num_bags);
    return cuts;
  }

  void sum_hot_blocks() {
    struct Block {
      std::int64_t begin;
      std::int64_t end;
    };
    std::vector<Block> blocks;
    for (std::int64_t u = 0; u < rows_.num_rows; ++u) {
      if (std::int64_t{starts_[u + 1]} - starts_[u] <= kGradientBlock) continue;
      hot_.push_back({u, static_cast<std::int64_t>(blocks.size())});
      for (std::int64_t i = starts_[u]; i < starts_[u + 1]; i += kGradientBlock) {
        blocks.push_back({i, std::min<std::int64_t>(i + kGradientBlock, starts_[u + 1])});
      }
    }
    block_sums_.resize(blocks.size() * rows_.dim);
    parallel_tasks(static_cast<std::int64_t>(blocks.size()), [&](std::int64_t b) {
      sum_block(blocks[b].begin, blocks[b].end, block_sums_.data() + b * rows_.dim);
    });
  }

  // total = the gradient of row u; `block` is scratch. Both [dim].
  void row_gradient(std::int64_t u, float* __restrict total, float* __restrict block) const {
    const std::int64_t dim = rows_.dim;
    const std::int64_t num_occurrences = std::int64_t{starts_[u + 1]} - starts_[u];
    if (num_occurrences <= kGradientBlock) {
      // A sum that starts at +0.0 is never -0.0, so adding it to +0.0 once more changes nothing.
      sum_block(starts_[u], starts_[u + 1], total);
      return;
    }
    const auto hot = std::lower_bound(hot_.begin(), hot_.end(), u,
                                      [](const Hot& h, std::int64_t row) { return h.row < row; });
    const std::int64_t num_blocks = (num_occurrences + kGradientBlock - 1) / kGradientBlock;
    std::fill_n(total, dim, 0.0f);
    for (std::int64_t b = 0; b < num_blocks; ++b) {
      std::copy_n(block_sums_.data() + (hot->first_block + b) * dim, dim, block);
      for (std::int64_t d = 0; d < dim; ++d) total[d] += block[d];
    }
  }

  void sum_block(std::int64_t begin, std::int64_t end, float* __restrict sum) const {
    if (is_uniform_) return sum_uniform_block(begin, end, sum);
    std::fill_n(sum, rows_.dim, 0.0f);
    for (std::int64_t i = begin; i < end; ++i) {
      request(i + kAhead);
      add_occurrence(sorted_[i], sum);
    }
  }

  void request(std::int64_t i) const {
    if (i >= num_sorted_) return;
    const float* ahead = bags_[sorted_[i].bag].grad;
    if (ahead != nullptr) prefetch_row(ahead, rows_.dim);
  }

  // Where all bags' gradients are taken alike; those that are 0 are left out.
  void sum_uniform_block(std::int64_t begin, std::int64_t end, float* __restrict sum) const {
    const float* sources[kMostRowsAtATime];
    float factors[kMostRowsAtATime];
    const std::int64_t most = rows_at_a_time(rows_.dim);
    bool from_zero = true;
    std::int64_t count = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      request(i + kAhead);
      const Bag& bag = bags_[sorted_[i].bag];
      if (bag.grad == nullptr) continue;
      sources[count] = bag.grad;
      if (weighing_ != Weighing::kPlain) {
        factors[count] =
            weighing_ == Weighing::kOver ? bag.count : list_.weights[sorted_[i].position];
      }
      if (++count < most) continue;
      add_rows_(sources, factors, count, rows_.dim, from_zero, sum);
      from_zero = false;
      count = 0;
    }
    if (count > 0 || from_zero) add_rows_(sources, factors, count, rows_.dim, from_zero, sum);
  }

  void add_occurrence(const Occurrence& occurrence, float* __restrict sum) const {
    const Bag& bag = bags_[occurrence.bag];
    const std::int64_t dim = rows_.dim;
    const float* __restrict grad = bag.grad;
    if (grad == nullptr) return;  // +0.0 added to a sum that started at +0.0
    if (bag.mode == PoolMode::kMean) {
      for (std::int64_t d = 0; d < dim; ++d) sum[d] += grad[d] / bag.count;
    } else if (bag.mode == PoolMode::kMax) {
      const std::uint32_t* __restrict winners = bag.winners;
      for (std::int64_t d = 0; d < dim; ++d) {
        sum[d] += winners[d] == occurrence.position ? grad[d] : 0.0f;
      }
    } else if (list_.weights != nullptr) {
      const float weight = list_.weights[occurrence.position];
      for (std::int64_t d = 0; d < dim; ++d) sum[d] += weight * grad[d];
    } else {
      for (std::int64_t d = 0; d < dim; ++d) sum[d] += grad[d];
    }
  }

  struct Hot {
    std::int64_t row;
    std::int64_t first_block;
  };

  const RowMatrix& rows_;
  const BagList& list_;
  std::vector<Bag> bags_;
  std::vector<std::uint32_t> winners_;  // [max bags with a gradient, dim]
  bool is_uniform_ = false;             // No maxima, and not both means and others.
  Weighing weighing_ = Weighing::kPlain;
  AddRows add_rows_ = nullptr;
  std::vector<std::uint32_t>
      starts_;  // [num_rows + 1]; row u owns sorted_[starts_[u] .. starts_[u + 1]]
  std::unique_ptr<Occurrence[]> sorted_;
  std::int64_t num_sorted_ = 0;
  std::vector<Hot> hot_;           // ascending rows
  std::vector<float> block_sums_;  // [hot blocks, dim]
};

}  // namespace

void lookup_pool_backward(const RowMatrix& rows, const BagList& bags,
                          const std::vector<SegmentGradient>& grads, float* accumulator) {
  check_bags(bags, rows.num_rows, grads.size());
  Backward backward(rows, bags, grads);
  const std::int64_t dim = rows.dim;
  const auto add = [&](std::int64_t begin, std::int64_t end, const float* __restrict gradients) {
    for (std::int64_t u = begin; u < end; ++u) {
      if (!backward.occurs(u)) continue;
      float* __restrict target = accumulator + u * dim;
      const float* __restrict gradient = gradients + (u - begin) * dim;
      for (std::int64_t d = 0; d < dim; ++d) target[d] += gradient[d];
    }
  };
  with_slots(bags, [&](auto slots) { backward.run(slots, add); });
}

void lookup_pool_gradients(const RowMatrix& rows, const BagList& bags,
                           const std::vector<SegmentGradient>& grads, const UseGradients& use) {
  check_bags(bags, rows.num_rows, grads.size());
  Backward backward(rows, bags, grads);
  with_slots(bags, [&](auto slots) { backward.run(slots, use); });
}

double lookup_pool_gradient_bound(const BagList& bags, const std::vector<SegmentGradient>& grads,
                                  std::int64_t dim) {
  // As integers, magnitudes have the order of their values, and what is not finite is above all.
  std::int32_t largest_bits = 0;
  std::mutex mutex;
  const auto note = [&](std::int32_t bits) {
    const std::lock_guard<std::mutex> guard(mutex);
    largest_bits = std::max(largest_bits, bits);
  };
  const auto magnitude = [](const float* values, std::int64_t size, std::int32_t largest) {
    for (std::int64_t d = 0; d < size; ++d) {
      std::int32_t bits;
      std::memcpy(&bits, values + d, sizeof bits);
      bits &= 0x7FFFFFFF;
      largest = bits > largest ? bits : largest;
    }
    return largest;
  };
  for (std::int64_t s = 0; s < bags.num_segments(); ++s) {
    if (grads[s].data == nullptr) continue;
    const std::int64_t size = bags.segment_bags[s + 1] - bags.segment_bags[s];
    parallel_ranges(size, rows_per_task(dim), [&](std::int64_t begin, std::int64_t end) {
      std::int32_t largest = 0;
      for (std::int64_t b = begin; b < end; ++b) {
        largest = magnitude(grads[s].data + b * grads[s].stride, dim, largest);
      }
      note(largest);
    });
  }
  const auto value = [](std::int32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return std::isfinite(number) ? double{number} : std::numeric_limits<double>::infinity();
  };
  double bound = value(largest_bits);
  if (bags.weights != nullptr && bags.num_occurrences > 0) {
    const double weight = value(magnitude(bags.weights, bags.num_occurrences, 0));
    if (!std::isfinite(weight)) return weight;
    bound *= std::max(weight, 1.0);
  }
  // n roundings up make a sum of n values larger by a factor below e for n < 2^24, and blocks have
  // fewer; 4 for good measure.
  return bound * 4.0 * static_cast<double>(std::max<std::int64_t>(1, bags.num_occurrences));
}

void lookup_pool_weight_grad(const RowMatrix& rows, const BagList& bags,
                             const std::vector<SegmentGradient>& grads, float* weight_grad) {
  check_bags(bags, rows.num_rows, grads.size());
  if (has_mode(bags, PoolMode::kMean) || has_mode(bags, PoolMode::kMax)) {
    throw std::invalid_argument("lookup_pool: gradients of weights need pooling sum or none");
  }
  const auto work_before = [&](std::int64_t bag) { return bags.bag_offsets[bag] + bag; };
  with_slots(bags, [&](auto slots) {
    const auto one_bag = [&](std::int64_t segment, std::int64_t bag) {
      const SegmentGradient& segment_grad = grads[segment];
      const std::int64_t row_index = bag - bags.segment_bags[segment];
      for (std::int64_t j = bags.bag_offsets[bag]; j < bags.bag_offsets[bag + 1]; ++j) {
        if (slots[j] < 0 || segment_grad.data == nullptr) {
          weight_grad[j] = 0.0f;
          continue;
        }
        const float* grad = segment_grad.data + row_index * segment_grad.stride;
        const float* row = rows.row(slots[j]);
        weight_grad[j] = lane_sum(rows.dim, [=](std::int64_t d) { return grad[d] * row[d]; });
      }
    };
    parallel_by_work(
        bags.num_bags, rows_per_task(rows.dim), work_before,
        [&](std::int64_t begin, std::int64_t end) { for_each_bag(bags, begin, end, one_bag); });
  });
}

}  // namespace nestpipe
