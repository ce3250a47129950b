// Who uses what in a batch, and the random numbers of clustering.
#include <algorithm>

#include "cluster_parts.h"
#include "nestpipe/hash.h"

namespace nestpipe::clustering {

std::uint64_t Random::next() {
  state_ += 0x9E3779B97F4A7C15ull;
  return mix64(state_);
}

Incidence::Incidence(const ClusterProblem& problem)
    : id_begin(static_cast<std::size_t>(problem.num_samples + 1), 0),
      alone(static_cast<std::size_t>(problem.num_samples), 0),
      sample_begin(1, 0) {
  constexpr std::int32_t kNobody = -1;
  struct Use {
    std::int32_t last_user = kNobody, users = 0, renumbered = kNobody;
  };
  std::vector<Use> uses(static_cast<std::size_t>(problem.num_ids));
  std::vector<std::int32_t> distinct;  // ids of sample after sample, repeats removed
  distinct.reserve(static_cast<std::size_t>(problem.sample_offsets[problem.num_samples]));
  std::vector<std::int64_t> distinct_begin(1, 0);
  for (std::int32_t sample = 0; sample < problem.num_samples; ++sample) {
    const std::int64_t end = problem.sample_offsets[sample + 1];
    for (std::int64_t i = problem.sample_offsets[sample]; i < end; ++i) {
      Use& use = uses[problem.ids[i]];
      if (use.last_user == sample) continue;
      use.last_user = sample;
      ++use.users;
      distinct.push_back(problem.ids[i]);
    }
    distinct_begin.push_back(static_cast<std::int64_t>(distinct.size()));
  }

  ids.reserve(distinct.size());
  for (std::int64_t sample = 0; sample < problem.num_samples; ++sample) {
    for (std::int64_t i = distinct_begin[sample]; i < distinct_begin[sample + 1]; ++i) {
      Use& use = uses[distinct[i]];
      if (use.users == 1) {
        ++alone[sample];
        continue;
      }
      if (use.renumbered == kNobody) {
        use.renumbered = static_cast<std::int32_t>(num_ids());
        sample_begin.push_back(sample_begin.back() + use.users);
      }
      ids.push_back(use.renumbered);
    }
    id_begin[sample + 1] = static_cast<std::int64_t>(ids.size());
  }

  samples.resize(ids.size());
  std::vector<std::int64_t> next(sample_begin.begin(), sample_begin.end() - 1);
  for (std::int64_t sample = 0; sample < problem.num_samples; ++sample) {
    for (std::int64_t i = id_begin[sample]; i < id_begin[sample + 1]; ++i)
      samples[next[ids[i]]++] = static_cast<std::int32_t>(sample);
  }
}

std::int64_t Incidence::max_ids_of_sample() const {
  std::int64_t most = 0;
  for (std::int64_t s = 0; s < num_samples(); ++s)
    most = std::max(most, id_begin[s + 1] - id_begin[s] + alone[s]);
  return most;
}

}  // namespace nestpipe::clustering
