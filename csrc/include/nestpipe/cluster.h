// Reorders the samples of a batch so that those sharing keys meet in the same micro-batch.
#pragma once

#include <cstdint>

namespace nestpipe {

enum class ClusterObjective : int {
  kSendOnce = 0,  // distinct ids of the first part + of the last part; then even first-use and
                  // last-use sets
  kResend = 1,    // distinct ids of each part, summed over the parts
};

// Sample s uses ids[sample_offsets[s] .. sample_offsets[s + 1]), repeats allowed. Parts take
// consecutive samples of the order: part i takes num_samples / num_parts + (i < num_samples %
// num_parts).
struct ClusterProblem {
  const std::int64_t* sample_offsets;  // [num_samples + 1]
  const std::int32_t* ids;             // [sample_offsets[num_samples]], in [0, num_ids)
  std::int64_t num_samples;
  std::int64_t num_ids;
  std::int64_t num_parts;
};

// order [num_samples]: a permutation, ascending inside each part, never worse than the identity by
// its objective (the identity if a sample uses 2^22 distinct ids or more). A function of the
// problem, objective and seed alone: one thread, integers only.
void cluster(const ClusterProblem& problem, ClusterObjective objective, std::uint64_t seed,
             std::int64_t* order);

}  // namespace nestpipe
