// Who uses what in a batch, and the random numbers of clustering.
#include "cluster_parts.h"
#include "nestpipe/hash.h"

namespace nestpipe::clustering {

std::uint64_t Random::next() {
  state_ += 0x9E3779B97F4A7C15ull;
  return mix64(state_);
}

IndexPair draw_pair(Random& random, std::int64_t first_bound, std::int64_t second_bound) {
  const std::uint64_t word = random.next();
  return {static_cast<std::int64_t>(((word >> 32) * static_cast<std::uint64_t>(first_bound)) >> 32),
          static_cast<std::int64_t>(
              ((word & 0xFFFFFFFFull) * static_cast<std::uint64_t>(second_bound)) >> 32)};
}

Incidence::Incidence(const ClusterProblem& problem)
    : id_begin(static_cast<std::size_t>(problem.num_samples + 1), 0),
      alone(static_cast<std::size_t>(problem.num_samples), 0),
      sample_begin(static_cast<std::size_t>(problem.num_ids + 1), 0) {
  constexpr std::int32_t kNobody = -1;
  const auto for_each_use = [&](auto&& use) {
    std::vector<std::int32_t> last_user(static_cast<std::size_t>(problem.num_ids), kNobody);
    for (std::int64_t sample = 0; sample < problem.num_samples; ++sample) {
      const std::int64_t end = problem.sample_offsets[sample + 1];
      for (std::int64_t i = problem.sample_offsets[sample]; i < end; ++i) {
        const std::int32_t id = problem.ids[i];
        if (last_user[id] == sample) continue;
        last_user[id] = static_cast<std::int32_t>(sample);
        use(sample, id);
      }
    }
  };
  std::vector<std::int32_t> num_users(static_cast<std::size_t>(problem.num_ids), 0);
  for_each_use([&](std::int64_t, std::int32_t id) { ++num_users[id]; });
  for (std::int64_t id = 0; id < problem.num_ids; ++id) {
    sample_begin[id + 1] = sample_begin[id] + (num_users[id] > 1 ? num_users[id] : 0);
  }
  ids.reserve(static_cast<std::size_t>(sample_begin.back()));
  samples.resize(static_cast<std::size_t>(sample_begin.back()));
  std::vector<std::int64_t> next(sample_begin.begin(), sample_begin.end() - 1);
  for_each_use([&](std::int64_t sample, std::int32_t id) {
    if (num_users[id] > 1) {
      ids.push_back(id);
      samples[next[id]++] = static_cast<std::int32_t>(sample);
    } else {
      ++alone[sample];
    }
    id_begin[sample + 1] = static_cast<std::int64_t>(ids.size());
  });
  for (std::int64_t sample = 0; sample < problem.num_samples; ++sample) {
    if (id_begin[sample + 1] < id_begin[sample]) id_begin[sample + 1] = id_begin[sample];
  }
}

}  // namespace nestpipe::clustering
