// Swaps of two samples, so that group sizes stay exact, under falling noise.
//
// Invariants between swaps, for every counted group g, id and position:
//   cell(id, g)    = how many samples of g use id, and the xor of their numbers
//   missing(g)[at] = ids of the sample at that position that no sample of g uses
//   needed_[at]    = ids of that sample that no other sample of its group uses
// (the last two in units of 1 / kScale ids; 0 for groups that are not counted). Swapping the sample
// at `a` (in p) with that at `b` (in q) changes the cost by
//   missing(q)[a] - needed_[a] + missing(p)[b] - needed_[b]
// plus a correction for ids that both use, which is never negative. So for one sample, all partners
// are priced by subtracting two arrays, and only the best of them is looked at closely.
//
// Each sweep goes through the positions of counted groups. The noise taken off a partner's price is
// exponentially distributed, as in annealing: a worsening of d ids passes with probability 2^(-d /
// temperature). Integers only, so every machine takes the same decisions.
#include <algorithm>
#include <limits>

#include "cluster_parts.h"

namespace nestpipe::clustering {
namespace {

constexpr std::int64_t kScale = 8;
constexpr std::int64_t kSweeps = 8;
// Sweeps without noise that follow while they still find something.
constexpr std::int64_t kMoreSweeps = 2;
// Of the first sweep, in units of 2^-16 / kScale ids; falls linearly to 0.
constexpr std::int64_t kFirstTemperature = kScale << 15;

// With u = 2^-(k+1) * (1 + m) uniform, -log2(u) is taken as k + 1 - m (never off by more than
// 0.09).
std::int64_t exponential(std::uint64_t word, std::int64_t temperature) {
  const int zeros = __builtin_clzll(word | 1);
  const auto mantissa = static_cast<std::int64_t>(((word << zeros) << 1) >> 48);
  return (temperature * (((std::int64_t{zeros} + 1) << 16) - mantissa)) >> 32;
}

constexpr std::int64_t kMaxNoise = (kFirstTemperature * 65) >> 16;

template <class Count>
class Swapper {
 public:
  Swapper(const Incidence& incidence, const Groups& groups, std::vector<std::int64_t>& order);
  void run(Random& random);

 private:
  struct Cell {
    std::int32_t users = 0, who = 0;
  };

  // Whether anything got better.
  bool sweep(std::int64_t temperature, Random& random);
  std::int64_t swap_with_best(std::int64_t a, const Count* noise);
  std::int64_t shared_correction(std::int64_t a, std::int64_t b);
  void swap(std::int64_t a, std::int64_t b);
  void move_ids(std::int32_t s, std::int32_t partner, std::int32_t from, std::int32_t to);
  void remove_user(std::int32_t id, std::int32_t group, std::int32_t user);
  void add_user(std::int32_t id, std::int32_t group, std::int32_t user);
  void shift_missing(std::int32_t id, std::int32_t group, std::int64_t by);
  void count_needed(std::int64_t at);
  void mark(std::int64_t s) {
    ++mark_;
    for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i)
      mark_of_[in_.ids[i]] = mark_;
  }
  Cell& cell(std::int32_t id, std::int32_t group) { return cells_[id * num_groups_ + group]; }
  Count* missing(std::int32_t group) { return missing_.data() + group * in_.num_samples(); }

  const Incidence& in_;
  const Groups& groups_;
  std::vector<std::int64_t>& order_;
  std::int64_t num_groups_;
  std::vector<std::int32_t> group_at_;     // by position
  std::vector<std::int32_t> position_of_;  // by sample
  std::vector<Cell> cells_;
  std::vector<Count> missing_, needed_;
  std::vector<Count> noise_;            // twice as many as there are samples
  std::vector<std::uint32_t> mark_of_;  // by id
  std::uint32_t mark_ = 0;
};

template <class Count>
Swapper<Count>::Swapper(const Incidence& incidence, const Groups& groups,
                        std::vector<std::int64_t>& order)
    : in_(incidence),
      groups_(groups),
      order_(order),
      num_groups_(groups.size()),
      group_at_(order.size()),
      position_of_(order.size()),
      cells_(static_cast<std::size_t>(incidence.num_ids() * num_groups_)),
      missing_(order.size() * groups.counted.size(), 0),
      needed_(order.size(), 0),
      noise_(2 * order.size(), 0),
      mark_of_(static_cast<std::size_t>(incidence.num_ids()), 0) {
  for (std::int32_t group = 0; group < num_groups_; ++group) {
    for (std::int64_t at = groups.begin[group]; at < groups.begin[group + 1]; ++at) {
      const auto s = static_cast<std::int32_t>(order[at]);
      group_at_[at] = group;
      position_of_[s] = static_cast<std::int32_t>(at);
      if (!groups.counted[group]) continue;
      for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i) {
        Cell& found = cell(in_.ids[i], group);
        ++found.users;
        found.who ^= s;
      }
    }
  }
  for (std::int64_t at = 0; at < in_.num_samples(); ++at) {
    const std::int64_t s = order[at];
    for (std::int32_t group = 0; group < num_groups_; ++group) {
      if (!groups.counted[group]) continue;
      std::int64_t ids = in_.alone[s];
      for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i)
        ids += cell(in_.ids[i], group).users == 0;
      missing(group)[at] = static_cast<Count>(ids * kScale);
    }
    count_needed(at);
  }
}

template <class Count>
void Swapper<Count>::count_needed(std::int64_t at) {
  const std::int32_t group = group_at_[at];
  if (!groups_.counted[group]) return;
  const std::int64_t s = order_[at];
  std::int64_t ids = in_.alone[s];
  for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i)
    ids += cell(in_.ids[i], group).users == 1;
  needed_[at] = static_cast<Count>(ids * kScale);
}

template <class Count>
void Swapper<Count>::run(Random& random) {
  for (std::int64_t left = kSweeps - 1; left > 0; --left)
    sweep(kFirstTemperature * left / (kSweeps - 1), random);
  for (std::int64_t more = 0; more <= kMoreSweeps; ++more) {
    if (!sweep(0, random)) return;
  }
}

template <class Count>
bool Swapper<Count>::sweep(std::int64_t temperature, Random& random) {
  for (Count& noise : noise_) {
    noise =
        temperature > 0 ? static_cast<Count>(exponential(random.next(), temperature)) : Count{0};
  }
  bool is_better = false;
  for (std::int64_t at = 0; at < in_.num_samples(); ++at) {
    if (!groups_.counted[group_at_[at]]) continue;
    // Another stretch of noise for every sample.
    const std::int64_t offset = random.below(in_.num_samples());
    is_better |= swap_with_best(at, noise_.data() + offset) < 0;
  }
  return is_better;
}

// Swaps the sample at `a` with its best partner unless that makes things worse by more than the
// partner's noise; returns the change of cost in units of 1 / kScale ids. Swaps that change nothing
// need noise, so sweeps without it come to an end.
template <class Count>
std::int64_t Swapper<Count>::swap_with_best(std::int64_t a, const Count* noise) {
  const std::int32_t p = group_at_[a];
  const Count* missing_in_p = missing(p);
  const Count* needed = needed_.data();
  std::int64_t least = 1, best_group = -1;
  Count best_price = 0;
  for (std::int32_t q = 0; q < num_groups_; ++q) {
    if (q == p) continue;
    Count price = std::numeric_limits<Count>::max();
    for (std::int64_t b = groups_.begin[q]; b < groups_.begin[q + 1]; ++b) {
      const auto here = static_cast<Count>(missing_in_p[b] - needed[b] - noise[b]);
      price = std::min(price, here);
    }
    const std::int64_t change = std::int64_t{missing(q)[a]} - needed[a] + price;
    if (change >= least) continue;
    least = change;
    best_group = q;
    best_price = price;
  }
  if (best_group < 0) return 0;
  std::int64_t b = groups_.begin[best_group];
  while (static_cast<Count>(missing_in_p[b] - needed[b] - noise[b]) != best_price) ++b;
  least += shared_correction(a, b) * kScale;
  if (least > 0 || (least == 0 && noise[b] == 0)) return 0;
  const std::int64_t change = least + noise[b];
  swap(a, b);
  return change;
}

// Ids that both use stay in both groups; `missing` and `needed` wrongly count one as lost where its
// last user seems to leave.
template <class Count>
std::int64_t Swapper<Count>::shared_correction(std::int64_t a, std::int64_t b) {
  const std::int32_t p = group_at_[a], q = group_at_[b];
  const std::int64_t t = order_[b];
  mark(order_[a]);
  std::int64_t correction = 0;
  for (std::int64_t i = in_.id_begin[t]; i < in_.id_begin[t + 1]; ++i) {
    const std::int32_t id = in_.ids[i];
    if (mark_of_[id] == mark_) correction += (cell(id, p).users == 1) + (cell(id, q).users == 1);
  }
  return correction;
}

template <class Count>
void Swapper<Count>::swap(std::int64_t a, std::int64_t b) {
  const auto s = static_cast<std::int32_t>(order_[a]), t = static_cast<std::int32_t>(order_[b]);
  std::swap(order_[a], order_[b]);
  std::swap(position_of_[s], position_of_[t]);
  for (std::int32_t group = 0; group < num_groups_; ++group)
    std::swap(missing(group)[a], missing(group)[b]);
  move_ids(s, t, group_at_[a], group_at_[b]);
  move_ids(t, s, group_at_[b], group_at_[a]);
  count_needed(a);
  count_needed(b);
}

// Takes the ids of s from one group to another. Those that the partner uses, too, stay in both.
template <class Count>
void Swapper<Count>::move_ids(std::int32_t s, std::int32_t partner, std::int32_t from,
                              std::int32_t to) {
  mark(partner);
  for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i) {
    const std::int32_t id = in_.ids[i];
    if (mark_of_[id] == mark_) {
      cell(id, from).who ^= s ^ partner;
      continue;
    }
    if (groups_.counted[from]) remove_user(id, from, s);
    if (groups_.counted[to]) add_user(id, to, s);
  }
}

template <class Count>
void Swapper<Count>::remove_user(std::int32_t id, std::int32_t group, std::int32_t user) {
  Cell& found = cell(id, group);
  found.who ^= user;
  if (--found.users == 0) {
    shift_missing(id, group, kScale);
  } else if (found.users == 1) {
    needed_[position_of_[found.who]] += static_cast<Count>(kScale);
  }
}

template <class Count>
void Swapper<Count>::add_user(std::int32_t id, std::int32_t group, std::int32_t user) {
  Cell& found = cell(id, group);
  if (++found.users == 1) {
    shift_missing(id, group, -kScale);
  } else if (found.users == 2) {
    needed_[position_of_[found.who]] -= static_cast<Count>(kScale);
  }
  found.who ^= user;
}

template <class Count>
void Swapper<Count>::shift_missing(std::int32_t id, std::int32_t group, std::int64_t by) {
  Count* counts = missing(group);
  for (std::int64_t i = in_.sample_begin[id]; i < in_.sample_begin[id + 1]; ++i)
    counts[position_of_[in_.samples[i]]] += static_cast<Count>(by);
}

}  // namespace

void swap_samples(const Incidence& incidence, const Groups& groups, Random& random,
                  std::vector<std::int64_t>& order) {
  constexpr std::int64_t kShort = (std::numeric_limits<std::int16_t>::max() - kMaxNoise) / kScale;
  if (incidence.max_ids_of_sample() < kShort) {
    Swapper<std::int16_t>(incidence, groups, order).run(random);
  } else {
    Swapper<std::int32_t>(incidence, groups, order).run(random);
  }
}

}  // namespace nestpipe::clustering
