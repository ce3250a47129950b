// Simulated annealing by swaps of two samples, so that group sizes stay exact.
//
// Invariants between swaps, for every counted group g and sample s:
//   users_[id, g]  = number of samples of g that use id
//   absent_[s, g]  = number of ids of s with users_[id, g] == 0: what s would add to g
//   needed_[s]     = number of ids of s with users_[id, group of s] == 1: what its group loses with
//   s (0 if not counted)
// The change of cost of swapping s (in p) and t (in q) is then absent_[s, q] - needed_[s] +
// absent_[t, p] - needed_[t], plus a correction for ids that both use; the correction is never
// negative, so most proposals are refused from these four numbers. An accepted swap visits the
// samples of an id only when its count in a group passes between 0 and 1 or between 1 and 2.
//
// Acceptance: a worsening of d rows passes if d <= T * -log2(u). With u = 2^-(k+1) * (1 + m),
// -log2(u) is taken as k + 1 - m (never off by more than 0.09): integers only, so every machine
// takes the same decisions.
#include "cluster_parts.h"

namespace nestpipe::clustering {
namespace {

// At the start, in units of 2^-16 rows; falls linearly to 0. Higher ones accept more swaps, take
// longer and end no lower.
constexpr std::int64_t kFirstTemperature = 3 << 14;

std::int64_t allowed_worsening(std::uint64_t word, std::int64_t temperature) {
  const int zeros = __builtin_clzll(word | 1);
  const auto mantissa = static_cast<std::int64_t>(((word << zeros) << 1) >> 48);
  return (temperature * (((std::int64_t{zeros} + 1) << 16) - mantissa)) >> 32;
}

class Annealer {
 public:
  Annealer(const Incidence& incidence, const Groups& groups, std::vector<std::int64_t>& order);
  void run(std::int64_t num_proposals, Random& random);

 private:
  void propose(std::int64_t temperature, Random& random);
  std::int64_t shared_correction(std::int64_t s, std::int64_t t, std::int32_t p, std::int32_t q);
  void swap(std::int64_t at_s, std::int64_t at_t);
  void move_ids(std::int64_t s, std::int32_t from, std::int32_t to);
  void remove_user(std::int32_t id, std::int32_t group);
  void add_user(std::int32_t id, std::int32_t group, std::int64_t user);
  void count_needed(std::int64_t s);
  void mark(std::int64_t s) {
    ++mark_;
    for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i)
      mark_of_[in_.ids[i]] = mark_;
  }
  std::int32_t& users(std::int32_t id, std::int32_t group) {
    return users_[id * num_groups_ + group];
  }
  std::int32_t& absent(std::int64_t s, std::int32_t group) {
    return absent_[s * num_groups_ + group];
  }

  const Incidence& in_;
  const Groups& groups_;
  std::vector<std::int64_t>& order_;
  std::int64_t num_groups_;
  std::vector<std::int64_t> counted_positions_;
  std::vector<std::int32_t> group_at_;  // by position
  std::vector<std::int32_t> group_of_;  // by sample
  std::vector<std::int32_t> users_, absent_, needed_;
  std::vector<std::uint32_t> mark_of_;  // by id
  std::uint32_t mark_ = 0;
};

Annealer::Annealer(const Incidence& incidence, const Groups& groups,
                   std::vector<std::int64_t>& order)
    : in_(incidence),
      groups_(groups),
      order_(order),
      num_groups_(groups.size()),
      group_at_(order.size()),
      group_of_(order.size()),
      users_((incidence.sample_begin.size() - 1) * groups.counted.size(), 0),
      absent_(order.size() * groups.counted.size(), 0),
      needed_(order.size(), 0),
      mark_of_(incidence.sample_begin.size() - 1, 0) {
  for (std::int32_t group = 0; group < num_groups_; ++group) {
    for (std::int64_t at = groups.begin[group]; at < groups.begin[group + 1]; ++at) {
      const std::int64_t s = order[at];
      group_at_[at] = group;
      group_of_[s] = group;
      if (!groups.counted[group]) continue;
      counted_positions_.push_back(at);
      for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i)
        ++users(in_.ids[i], group);
    }
  }
  for (std::int64_t s = 0; s < in_.num_samples(); ++s) {
    for (std::int32_t group = 0; group < num_groups_; ++group) {
      if (!groups.counted[group]) continue;
      absent(s, group) = in_.alone[s];
      for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i)
        absent(s, group) += users(in_.ids[i], group) == 0;
    }
    count_needed(s);
  }
}

void Annealer::count_needed(std::int64_t s) {
  const std::int32_t group = group_of_[s];
  needed_[s] = 0;
  if (!groups_.counted[group]) return;
  needed_[s] = in_.alone[s];
  for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i)
    needed_[s] += users(in_.ids[i], group) == 1;
}

void Annealer::run(std::int64_t num_proposals, Random& random) {
  if (counted_positions_.empty()) return;
  constexpr std::int64_t kStep = 256;
  for (std::int64_t done = 0; done < num_proposals; done += kStep) {
    const std::int64_t temperature = kFirstTemperature * (num_proposals - done) / num_proposals;
    for (std::int64_t i = 0; i < kStep; ++i) propose(temperature, random);
  }
}

void Annealer::propose(std::int64_t temperature, Random& random) {
  const IndexPair drawn =
      draw_pair(random, static_cast<std::int64_t>(counted_positions_.size()), in_.num_samples());
  const std::int64_t at_s = counted_positions_[drawn.first], at_t = drawn.second;
  const std::int32_t p = group_at_[at_s], q = group_at_[at_t];
  if (p == q) return;
  const std::int64_t allowed = allowed_worsening(random.next(), temperature);
  const std::int64_t s = order_[at_s], t = order_[at_t];
  // absent_ is 0 in groups that are not counted.
  std::int64_t change = absent(s, q) + absent(t, p) - needed_[s] - needed_[t];
  // Private ids of a sample stand in absent_ also for its own group; they never matter there, since
  // p != q.
  if (change > allowed) return;
  change += shared_correction(s, t, p, q);
  if (change > allowed) return;
  swap(at_s, at_t);
}

// Ids that both use stay in both groups; the four numbers wrongly count one as lost where its last
// user seems to leave.
std::int64_t Annealer::shared_correction(std::int64_t s, std::int64_t t, std::int32_t p,
                                         std::int32_t q) {
  mark(s);
  std::int64_t correction = 0;
  for (std::int64_t i = in_.id_begin[t]; i < in_.id_begin[t + 1]; ++i) {
    const std::int32_t id = in_.ids[i];
    if (mark_of_[id] == mark_) correction += (users(id, p) == 1) + (users(id, q) == 1);
  }
  return correction;
}

void Annealer::swap(std::int64_t at_s, std::int64_t at_t) {
  const std::int64_t s = order_[at_s], t = order_[at_t];
  const std::int32_t p = group_at_[at_s], q = group_at_[at_t];
  order_[at_s] = t;
  order_[at_t] = s;
  group_of_[s] = q;
  group_of_[t] = p;
  mark(t);
  move_ids(s, p, q);
  mark(s);
  move_ids(t, q, p);
  count_needed(s);
  count_needed(t);
}

// Takes the ids of s that are not marked (the partner does not use them) from one group to another.
void Annealer::move_ids(std::int64_t s, std::int32_t from, std::int32_t to) {
  for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i) {
    const std::int32_t id = in_.ids[i];
    if (mark_of_[id] == mark_) continue;
    if (groups_.counted[from]) remove_user(id, from);
    if (groups_.counted[to]) add_user(id, to, s);
  }
}

void Annealer::remove_user(std::int32_t id, std::int32_t group) {
  const std::int32_t left = --users(id, group);
  if (left > 1) return;
  for (std::int64_t i = in_.sample_begin[id]; i < in_.sample_begin[id + 1]; ++i) {
    const std::int32_t other = in_.samples[i];
    if (left == 0) {
      ++absent(other, group);
    } else if (group_of_[other] == group) {
      ++needed_[other];
      return;
    }
  }
}

void Annealer::add_user(std::int32_t id, std::int32_t group, std::int64_t user) {
  const std::int32_t now = ++users(id, group);
  if (now > 2) return;
  for (std::int64_t i = in_.sample_begin[id]; i < in_.sample_begin[id + 1]; ++i) {
    const std::int32_t other = in_.samples[i];
    if (now == 1) {
      --absent(other, group);
    } else if (group_of_[other] == group && other != user) {
      --needed_[other];
      return;
    }
  }
}

}  // namespace

void anneal(const Incidence& incidence, const Groups& groups, std::int64_t num_proposals,
            Random& random, std::vector<std::int64_t>& order) {
  Annealer(incidence, groups, order).run(num_proposals, random);
}

}  // namespace nestpipe::clustering
