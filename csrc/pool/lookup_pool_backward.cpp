// Backward: gradients of rows, summed per row in the fixed order; and gradients of per-sample
// weights.
//
// A stable counting sort by slot lists each row's occurrences in ascending order. Rows are then
// independent. A row with more than one block of occurrences (a hot key) has its blocks summed as
// tasks of their own and added afterwards in order.
#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "bag_checks.h"
#include "nestpipe/lane_sum.h"
#include "nestpipe/lookup_pool.h"
#include "nestpipe/row_tasks.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kAhead = 8;
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
    const auto describe = [&](std::int64_t segment, std::int64_t bag) {
      const SegmentGradient& grad = grads[segment];
      const std::int64_t row = bag - bags.segment_bags[segment];
      const auto mode = static_cast<PoolMode>(bags.segment_modes[segment]);
      bags_[bag] = {grad.data == nullptr ? nullptr : grad.data + row * grad.stride, mode, 0.0f,
                    nullptr};
      if (mode == PoolMode::kMax && grad.data != nullptr) ++max_bags;
    };
    for_each_bag(bags, 0, bags.num_bags, describe);
    if (max_bags > 0 && rows.data == nullptr && rows.num_rows > 0) {
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

  template <typename Slot>
  void run(const Slot* slots, float* accumulator) {
    describe_bags(slots);
    sort_occurrences(slots);
    sum_hot_blocks();
    const std::int64_t dim = rows_.dim;
    const auto work_before = [&](std::int64_t u) { return std::int64_t{starts_[u]} + u; };
    const auto add_rows = [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> scratch(2 * dim);
      for (std::int64_t u = begin; u < end; ++u) {
        if (starts_[u] == starts_[u + 1]) continue;
        row_gradient(u, scratch.data(), scratch.data() + dim);
        float* __restrict target = accumulator + u * dim;
        const float* __restrict gradient = scratch.data();
        for (std::int64_t d = 0; d < dim; ++d) target[d] += gradient[d];
      }
    };
    parallel_by_work(rows_.num_rows, rows_per_task(dim), work_before, add_rows);
  }

 private:
  // Counts for mean, winners for max.
  template <typename Slot>
  void describe_bags(const Slot* slots) {
    const auto work_before = [&](std::int64_t bag) { return list_.bag_offsets[bag] + bag; };
    parallel_by_work(list_.num_bags, rows_per_task(rows_.dim), work_before,
                     [&](std::int64_t begin, std::int64_t end) {
                       std::vector<float> maxima(winners_.empty() ? 0 : rows_.dim);
                       for (std::int64_t bag = begin; bag < end; ++bag) {
                         describe_bag(slots, bag, maxima.data());
                       }
                     });
  }

  template <typename Slot>
  void describe_bag(const Slot* slots, std::int64_t bag_index, float* maxima) {
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

  template <typename Slot>
  void sort_occurrences(const Slot* slots) {
    starts_.assign(rows_.num_rows + 2, 0);
    // Counts stand two places up, so that filling turns starts_[u + 1] into the end of u, which is
    // the start of u + 1.
    for (std::int64_t j = 0; j < list_.num_occurrences; ++j) {
      if (slots[j] >= 0) ++starts_[slots[j] + 2];
    }
    for (std::int64_t u = 0; u < rows_.num_rows; ++u) starts_[u + 2] += starts_[u + 1];
    sorted_.resize(starts_[rows_.num_rows + 1]);
    for (std::int64_t bag = 0; bag < list_.num_bags; ++bag) {
      for (std::int64_t j = list_.bag_offsets[bag]; j < list_.bag_offsets[bag + 1]; ++j) {
        if (slots[j] < 0) continue;
        sorted_[starts_[slots[j] + 1]++] = {static_cast<std::uint32_t>(bag),
                                            static_cast<std::uint32_t>(j)};
      }
    }
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
    std::fill_n(sum, rows_.dim, 0.0f);
    for (std::int64_t i = begin; i < end; ++i) {
      if (i + kAhead < static_cast<std::int64_t>(sorted_.size())) {
        const float* ahead = bags_[sorted_[i + kAhead].bag].grad;
        if (ahead != nullptr) prefetch_row(ahead, rows_.dim);
      }
      add_occurrence(sorted_[i], sum);
    }
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
  std::vector<std::uint32_t>
      starts_;  // [num_rows + 2]; row u owns sorted_[starts_[u] .. starts_[u + 1]]
  std::vector<Occurrence> sorted_;
  std::vector<Hot> hot_;           // ascending rows
  std::vector<float> block_sums_;  // [hot blocks, dim]
};

}  // namespace

void lookup_pool_backward(const RowMatrix& rows, const BagList& bags,
                          const std::vector<SegmentGradient>& grads, float* accumulator) {
  check_bags(bags, rows.num_rows, grads.size());
  Backward backward(rows, bags, grads);
  with_slots(bags, [&](const auto* slots) { backward.run(slots, accumulator); });
}

void lookup_pool_weight_grad(const RowMatrix& rows, const BagList& bags,
                             const std::vector<SegmentGradient>& grads, float* weight_grad) {
  check_bags(bags, rows.num_rows, grads.size());
  if (has_mode(bags, PoolMode::kMean) || has_mode(bags, PoolMode::kMax)) {
    throw std::invalid_argument("lookup_pool: gradients of weights need pooling sum or none");
  }
  const auto work_before = [&](std::int64_t bag) { return bags.bag_offsets[bag] + bag; };
  with_slots(bags, [&](const auto* slots) {
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
