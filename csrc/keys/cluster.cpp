// Clustering: grow a start, swap samples between the counted groups, even out the middle, sort
// inside parts, and keep the result only if it beats the identity.
#include "nestpipe/cluster.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "cluster_parts.h"

namespace nestpipe {
namespace {

using clustering::Groups;
using clustering::Incidence;
using clustering::Random;

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

// Cost of an order: what the objective minimises first, then the unevenness of first-use and
// last-use sets.
struct Cost {
  std::int64_t rows, unevenness;
  bool operator<(const Cost& other) const {
    return rows != other.rows ? rows < other.rows : unevenness < other.unevenness;
  }
};

Cost cost_of(const Incidence& incidence, const std::vector<std::int64_t>& part_begin,
             ClusterObjective objective, const std::vector<std::int64_t>& order) {
  const auto num_parts = static_cast<std::int32_t>(part_begin.size() - 1);
  std::vector<std::int32_t> seen_in(static_cast<std::size_t>(incidence.num_ids()), -1);
  std::vector<std::int64_t> rows(part_begin.size() - 1, 0), first(rows), last(rows);
  for (std::int32_t part = 0; part < num_parts; ++part) {
    for (std::int64_t at = part_begin[part]; at < part_begin[part + 1]; ++at) {
      const std::int64_t s = order[at];
      rows[part] += incidence.alone[s];
      first[part] += incidence.alone[s];
      last[part] += incidence.alone[s];
      for (std::int64_t i = incidence.id_begin[s]; i < incidence.id_begin[s + 1]; ++i) {
        std::int32_t& seen = seen_in[incidence.ids[i]];
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

  const Incidence incidence(problem);
  if (incidence.max_ids_of_sample() >= clustering::kMaxIds) return;
  const std::vector<std::int64_t> part_begin = part_begins(problem.num_samples, problem.num_parts);
  const Groups groups = make_groups(part_begin, objective);
  const std::vector<std::int64_t> identity(order, order + problem.num_samples);
  std::vector<std::int64_t> found = identity;
  Random random(seed);
  if (std::all_of(groups.counted.begin(), groups.counted.end(),
                  [](auto counted) { return counted; })) {
    clustering::grow_parts(incidence, part_begin, random, found);
  } else {
    clustering::grow_ends(incidence, part_begin, random, found);
  }
  clustering::swap_samples(incidence, groups, random, found);
  if (objective == ClusterObjective::kSendOnce) {
    clustering::sort_middle(incidence, part_begin, found);
    clustering::even_out(incidence, part_begin, kEvenProposalsPerSample * problem.num_samples,
                         random, found);
  }
  for (std::int64_t part = 0; part < problem.num_parts; ++part) {
    std::sort(found.begin() + part_begin[part], found.begin() + part_begin[part + 1]);
  }
  if (cost_of(incidence, part_begin, objective, found) <
      cost_of(incidence, part_begin, objective, identity)) {
    std::copy(found.begin(), found.end(), order);
  }
}

}  // namespace nestpipe
