// Pieces of clustering: which samples share which ids, a greedy start, swaps between groups, and
// evening out traffic.
#pragma once

#include <cstdint>
#include <vector>

#include "nestpipe/cluster.h"

namespace nestpipe::clustering {

// Pseudo-random 64-bit words, the same everywhere (a counter, mixed).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next();
  // A number below `bound`, which is below 2^32.
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(((next() >> 32) * static_cast<std::uint64_t>(bound)) >> 32);
  }

 private:
  std::uint64_t state_;
};

// No sample may use as many ids, or clustering leaves the order alone: sums of weights stay below
// 2^30.
constexpr std::int64_t kMaxIds = std::int64_t{1} << 22;

// Both directions of "sample uses id", repeats removed. Ids that one sample alone uses are only
// counted: no order shares them. The others are numbered anew, by their first use.
struct Incidence {
  explicit Incidence(const ClusterProblem& problem);
  std::int64_t num_samples() const { return static_cast<std::int64_t>(alone.size()); }
  std::int64_t num_ids() const { return static_cast<std::int64_t>(sample_begin.size()) - 1; }
  std::int64_t max_ids_of_sample() const;  // shared and alone
  std::int64_t num_users(std::int64_t id) const { return sample_begin[id + 1] - sample_begin[id]; }

  std::vector<std::int64_t> id_begin;      // [num_samples + 1] into ids
  std::vector<std::int32_t> ids;           // ids used by at least two samples
  std::vector<std::int32_t> alone;         // [num_samples] ids used by that sample only
  std::vector<std::int64_t> sample_begin;  // [num_ids + 1] into samples
  std::vector<std::int32_t> samples;       // ascending for each id
};

// Positions of an order, cut into consecutive groups; only counted groups have a cost, their number
// of distinct ids.
struct Groups {
  std::vector<std::int64_t> begin;  // [size() + 1]
  std::vector<std::uint8_t> counted;
  std::int64_t size() const { return static_cast<std::int64_t>(counted.size()); }
};

// Orders samples so that each part is grown from one sample by the nearest that is left; the next
// part begins with the sample farthest from the part before.
void grow_parts(const Incidence& incidence, const std::vector<std::int64_t>& part_begin,
                Random& random, std::vector<std::int64_t>& order);

// Grows the first part, then the last one, from several samples each, and keeps the cheapest; the
// others lie between, ascending.
void grow_ends(const Incidence& incidence, const std::vector<std::int64_t>& part_begin,
               Random& random, std::vector<std::int64_t>& order);

// Swaps samples between groups of `order` (a permutation) to lower the distinct ids of the counted
// groups.
void swap_samples(const Incidence& incidence, const Groups& groups, Random& random,
                  std::vector<std::int64_t>& order);

// Orders the samples between the first and the last part: those that share more ids with the first
// part than with the last come first (few of their ids are used for the first time there), those
// nearer to the last part come last. Ties keep sample order.
void sort_middle(const Incidence& incidence, const std::vector<std::int64_t>& part_begin,
                 std::vector<std::int64_t>& order);

// Swaps samples between parts 1 .. num_parts - 2 while that lowers the sum of squares of the parts'
// first-use and last-use sets. At most 64 parts (else does nothing).
void even_out(const Incidence& incidence, const std::vector<std::int64_t>& part_begin,
              std::int64_t num_proposals, Random& random, std::vector<std::int64_t>& order);

}  // namespace nestpipe::clustering
