// Pieces of clustering: which samples share which ids, annealed swaps between groups, and evening
// out traffic.
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

 private:
  std::uint64_t state_;
};

// Two numbers below `first_bound` and `second_bound` from the halves of a word.
struct IndexPair {
  std::int64_t first, second;
};
IndexPair draw_pair(Random& random, std::int64_t first_bound, std::int64_t second_bound);

// Both directions of "sample uses id", repeats removed. Ids that one sample alone uses are only
// counted: no swap shares them.
struct Incidence {
  explicit Incidence(const ClusterProblem& problem);
  std::int64_t num_samples() const { return static_cast<std::int64_t>(alone.size()); }

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

// Swaps samples between groups of `order` (a permutation) to lower the distinct ids of the counted
// groups.
void anneal(const Incidence& incidence, const Groups& groups, std::int64_t num_proposals,
            Random& random, std::vector<std::int64_t>& order);

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
