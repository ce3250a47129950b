// Evens out the traffic of the middle parts: row sends come from first uses, gradient sends from
// last uses.
//
// For every id a bit mask tells which parts use it, so its first and last part are the lowest and
// highest bit. A proposed swap of two samples is priced by the ids that only one of them uses, and
// kept if the sum of squares of all sets falls.
#include <algorithm>
#include <array>

#include "cluster_parts.h"

namespace nestpipe::clustering {
namespace {

constexpr std::int64_t kMaxParts = 64;

class Evener {
 public:
  Evener(const Incidence& incidence, const std::vector<std::int64_t>& part_begin,
         std::vector<std::int64_t>& order);
  void run(std::int64_t num_proposals, Random& random);

 private:
  void try_swap(std::int64_t at_s, std::int64_t at_t);
  // Calls visit(id, parts before, parts after) for the ids of s that its partner does not use.
  template <class Visit>
  void for_each_moved(std::int64_t s, std::int64_t partner, std::int32_t from, std::int32_t to,
                      Visit&& visit);
  void price_move(std::int64_t s, std::int64_t partner, std::int32_t from, std::int32_t to);
  void move(std::int64_t s, std::int64_t partner, std::int32_t from, std::int32_t to);
  struct Rows {
    std::array<std::int64_t, kMaxParts> first{}, last{};  // by part
    void count(std::uint64_t parts, std::int64_t by) {
      first[__builtin_ctzll(parts)] += by;
      last[63 - __builtin_clzll(parts)] += by;
    }
    void count_alone(std::int32_t part, std::int64_t by) {
      first[part] += by;
      last[part] += by;
    }
    std::int64_t unevenness(std::int64_t num_parts) const {
      std::int64_t sum = 0;
      for (std::int64_t part = 0; part < num_parts; ++part)
        sum += first[part] * first[part] + last[part] * last[part];
      return sum;
    }
  };

  const Incidence& in_;
  const std::vector<std::int64_t>& part_begin_;
  std::vector<std::int64_t>& order_;
  std::int64_t num_parts_;
  std::vector<std::int32_t> part_at_;  // by position
  std::vector<std::int32_t> users_;    // [id, part]
  std::vector<std::uint64_t> parts_of_;
  Rows rows_, trial_;
  std::int64_t unevenness_ = 0;
  std::vector<std::uint32_t> mark_of_;
  std::uint32_t mark_ = 0;
};

Evener::Evener(const Incidence& incidence, const std::vector<std::int64_t>& part_begin,
               std::vector<std::int64_t>& order)
    : in_(incidence),
      part_begin_(part_begin),
      order_(order),
      num_parts_(static_cast<std::int64_t>(part_begin.size()) - 1),
      part_at_(order.size()),
      users_(static_cast<std::size_t>(incidence.num_ids() * num_parts_), 0),
      parts_of_(static_cast<std::size_t>(incidence.num_ids()), 0),
      mark_of_(static_cast<std::size_t>(incidence.num_ids()), 0) {
  for (std::int32_t part = 0; part < num_parts_; ++part) {
    for (std::int64_t at = part_begin[part]; at < part_begin[part + 1]; ++at) {
      const std::int64_t s = order[at];
      part_at_[at] = part;
      rows_.count_alone(part, in_.alone[s]);
      for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i) {
        ++users_[in_.ids[i] * num_parts_ + part];
        parts_of_[in_.ids[i]] |= std::uint64_t{1} << part;
      }
    }
  }
  for (const std::uint64_t parts : parts_of_) rows_.count(parts, 1);
  unevenness_ = rows_.unevenness(num_parts_);
}

void Evener::run(std::int64_t num_proposals, Random& random) {
  const std::int64_t begin = part_begin_[1], size = part_begin_[num_parts_ - 1] - begin;
  if (size == 0) return;
  for (std::int64_t i = 0; i < num_proposals; ++i) {
    const std::int64_t first = random.below(size), second = random.below(size);
    try_swap(begin + first, begin + second);
  }
}

void Evener::try_swap(std::int64_t at_s, std::int64_t at_t) {
  const std::int32_t p = part_at_[at_s], q = part_at_[at_t];
  if (p == q) return;
  const std::int64_t s = order_[at_s], t = order_[at_t];
  trial_ = rows_;
  price_move(s, t, p, q);
  price_move(t, s, q, p);
  const std::int64_t now = trial_.unevenness(num_parts_);
  if (now >= unevenness_) return;
  unevenness_ = now;
  rows_ = trial_;
  order_[at_s] = t;
  order_[at_t] = s;
  move(s, t, p, q);
  move(t, s, q, p);
}

template <class Visit>
void Evener::for_each_moved(std::int64_t s, std::int64_t partner, std::int32_t from,
                            std::int32_t to, Visit&& visit) {
  ++mark_;
  for (std::int64_t i = in_.id_begin[partner]; i < in_.id_begin[partner + 1]; ++i)
    mark_of_[in_.ids[i]] = mark_;
  for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i) {
    const std::int32_t id = in_.ids[i];
    if (mark_of_[id] == mark_) continue;
    const std::int32_t* users = users_.data() + id * num_parts_;
    const std::uint64_t leaves = std::uint64_t{users[from] == 1} << from;
    visit(id, parts_of_[id], (parts_of_[id] & ~leaves) | std::uint64_t{1} << to);
  }
}

void Evener::price_move(std::int64_t s, std::int64_t partner, std::int32_t from, std::int32_t to) {
  trial_.count_alone(from, -in_.alone[s]);
  trial_.count_alone(to, in_.alone[s]);
  for_each_moved(s, partner, from, to,
                 [&](std::int32_t, std::uint64_t before, std::uint64_t after) {
                   if (before == after) return;
                   trial_.count(before, -1);
                   trial_.count(after, 1);
                 });
}

void Evener::move(std::int64_t s, std::int64_t partner, std::int32_t from, std::int32_t to) {
  for_each_moved(s, partner, from, to, [&](std::int32_t id, std::uint64_t, std::uint64_t after) {
    parts_of_[id] = after;
    --users_[id * num_parts_ + from];
    ++users_[id * num_parts_ + to];
  });
}

}  // namespace

void sort_middle(const Incidence& incidence, const std::vector<std::int64_t>& part_begin,
                 std::vector<std::int64_t>& order) {
  const std::size_t num_parts = part_begin.size() - 1;
  if (num_parts < 3) return;
  // An id pulls towards the end by 1 where the last part uses it, towards the start where the first
  // does.
  std::vector<std::int8_t> in_first(static_cast<std::size_t>(incidence.num_ids()), 0),
      in_last(in_first);
  const auto mark_part = [&](std::size_t part, std::vector<std::int8_t>& in_part) {
    for (std::int64_t at = part_begin[part]; at < part_begin[part + 1]; ++at) {
      const std::int64_t s = order[at];
      for (std::int64_t i = incidence.id_begin[s]; i < incidence.id_begin[s + 1]; ++i)
        in_part[incidence.ids[i]] = 1;
    }
  };
  mark_part(0, in_first);
  mark_part(num_parts - 1, in_last);
  std::vector<std::int32_t> pull(order.size(), 0);
  for (std::int64_t s = 0; s < incidence.num_samples(); ++s) {
    for (std::int64_t i = incidence.id_begin[s]; i < incidence.id_begin[s + 1]; ++i)
      pull[s] += in_last[incidence.ids[i]] - in_first[incidence.ids[i]];
  }
  std::sort(order.begin() + part_begin[1], order.begin() + part_begin[num_parts - 1],
            [&](std::int64_t a, std::int64_t b) {
              return pull[a] != pull[b] ? pull[a] < pull[b] : a < b;
            });
}

void even_out(const Incidence& incidence, const std::vector<std::int64_t>& part_begin,
              std::int64_t num_proposals, Random& random, std::vector<std::int64_t>& order) {
  const auto num_parts = static_cast<std::int64_t>(part_begin.size()) - 1;
  // Fewer than two middle parts leave nothing to swap.
  if (num_parts < 4 || num_parts > kMaxParts) return;
  Evener(incidence, part_begin, order).run(num_proposals, random);
}

}  // namespace nestpipe::clustering
