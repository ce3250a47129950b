// Clustering: anneal the counted groups, even out the middle, sort inside parts, and keep the
// result only if it beats the identity.
#include "nestpipe/cluster.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "cluster_parts.h"
#include "nestpipe/hash.h"

namespace nestpipe {
namespace {

using clustering::Groups;
using clustering::Incidence;
using clustering::Random;

constexpr std::int64_t kProposalsPerSample = 200;
constexpr std::int64_t kMaxProposals = std::int64_t{1} << 20;
constexpr std::int64_t kEvenProposalsPerSample = 4;

std::vector<std::int64_t> part_begins(std::int64_t num_samples, std::int64_t num_parts) {
  std::vector<std::int64_t> begin(static_cast<std::size_t>(num_parts + 1), 0);
  for (std::int64_t part = 0; part < num_parts; ++part) {
    begin[part + 1] =
        begin[part] + num_samples / num_parts + (part < num_samples % num_parts ? 1 : 0);
  }
  return begin;
}

// Send once counts the first and the last part and sees what lies between as one group.
Groups make_groups(const std::vector<std::int64_t>& part_begin, ClusterObjective objective) {
  const std::size_t num_parts = part_begin.size() - 1;
  if (objective == ClusterObjective::kResend || num_parts == 2) {
    return {part_begin, std::vector<std::uint8_t>(num_parts, 1)};
  }
  return {{0, part_begin[1], part_begin[num_parts - 1], part_begin[num_parts]}, {1, 0, 1}};
}

// Orders samples by the smallest hash of the ids they share with others (a one-value min-hash):
// samples with the same ids meet at once, which small swaps alone would not find where many samples
// use exactly the same ids.
void sort_by_min_hash(const Incidence& incidence, std::uint64_t seed,
                      std::vector<std::int64_t>& order) {
  std::vector<std::uint64_t> least(order.size(), ~std::uint64_t{0});
  for (std::int64_t s = 0; s < incidence.num_samples(); ++s) {
    for (std::int64_t i = incidence.id_begin[s]; i < incidence.id_begin[s + 1]; ++i)
      least[s] = std::min(least[s], hash_key(seed, incidence.ids[i]));
  }
  std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return least[a] != least[b] ? least[a] < least[b] : a < b;
  });
}

// Cost of an order: what the objective minimises first, then the unevenness of first-use and
// last-use sets.
struct Cost {
  std::int64_t rows, unevenness;
  bool operator<(const Cost& other) const {
    return rows != other.rows ? rows < other.rows : unevenness < other.unevenness;
  }
};

Cost cost_of(const ClusterProblem& problem, const std::vector<std::int64_t>& part_begin,
             ClusterObjective objective, const std::vector<std::int64_t>& order) {
  const auto num_parts = static_cast<std::size_t>(problem.num_parts);
  std::vector<std::int64_t> seen_in(static_cast<std::size_t>(problem.num_ids), -1);
  std::vector<std::int64_t> rows(num_parts, 0), first(num_parts, 0), last(num_parts, 0);
  for (std::int64_t part = 0; part < problem.num_parts; ++part) {
    for (std::int64_t at = part_begin[part]; at < part_begin[part + 1]; ++at) {
      const std::int64_t end = problem.sample_offsets[order[at] + 1];
      for (std::int64_t i = problem.sample_offsets[order[at]]; i < end; ++i) {
        std::int64_t& seen = seen_in[problem.ids[i]];
        if (seen == part) continue;
        first[part] += seen < 0;
        if (seen >= 0) --last[seen];
        ++last[part];
        ++rows[part];
        seen = part;
      }
    }
  }
  if (objective == ClusterObjective::kResend) {
    return {std::accumulate(rows.begin(), rows.end(), std::int64_t{0}), 0};
  }
  const auto square_sum = [](const std::vector<std::int64_t>& values) {
    return std::inner_product(values.begin(), values.end(), values.begin(), std::int64_t{0});
  };
  return {first.front() + last.back(), square_sum(first) + square_sum(last)};
}

}  // namespace

void cluster(const ClusterProblem& problem, ClusterObjective objective, std::uint64_t seed,
             std::int64_t* order) {
  std::iota(order, order + problem.num_samples, std::int64_t{0});
  if (problem.num_samples < 2 || problem.num_parts < 2) return;

  const std::vector<std::int64_t> identity(order, order + problem.num_samples);
  const std::vector<std::int64_t> part_begin = part_begins(problem.num_samples, problem.num_parts);
  std::vector<std::int64_t> found = identity;
  {
    const Incidence incidence(problem);
    Random random(seed);
    sort_by_min_hash(incidence, seed, found);
    const auto budget = std::min(kProposalsPerSample * problem.num_samples, kMaxProposals);
    clustering::anneal(incidence, make_groups(part_begin, objective), budget, random, found);
    if (objective == ClusterObjective::kSendOnce) {
      clustering::sort_middle(incidence, part_begin, found);
      clustering::even_out(incidence, part_begin, kEvenProposalsPerSample * problem.num_samples,
                           random, found);
    }
  }
  for (std::int64_t part = 0; part < problem.num_parts; ++part) {
    std::sort(found.begin() + part_begin[part], found.begin() + part_begin[part + 1]);
  }
  if (cost_of(problem, part_begin, objective, found) <
      cost_of(problem, part_begin, objective, identity)) {
    std::copy(found.begin(), found.end(), order);
  }
}

}  // namespace nestpipe
