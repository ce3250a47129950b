// A start for the swaps: parts grown from one sample by always adding the nearest.
//
// The distance of a sample to the part is the weight of its ids that the part lacks. An id that
// many samples use weighs less than one that few do: what it costs now will be shared by those that
// come after. Where two parts alone are counted (send once), ids of one sample alone count, too,
// and distance is all that matters. Where every part is counted, each sample has to go somewhere,
// so weights that the part lacks are set against those that it has.
#include <algorithm>

#include "cluster_parts.h"

namespace nestpipe::clustering {
namespace {

constexpr std::int32_t kWeight = 8;         // of every id
constexpr std::int32_t kSharedWeight = 48;  // of an id, divided among its users
constexpr std::int64_t kTriesPerPart = 2;   // of the first part, and of the last
constexpr std::int64_t kMaxTriedParts = 64;

class Grower {
 public:
  // `relative`: an id that the part has counts for a sample as much as one that it lacks counts
  // against it.
  Grower(const Incidence& incidence, bool relative);
  // Starts an empty part.
  void begin();
  // Adds a free sample to the part.
  void add(std::int64_t sample);
  bool is_free(std::int64_t sample) const { return is_free_[sample] != 0; }
  void set_free(const std::vector<std::int64_t>& samples, bool is_free) {
    for (const std::int64_t sample : samples) is_free_[sample] = is_free;
  }
  std::int64_t num_samples() const { return in_.num_samples(); }
  std::int64_t num_ids() const { return num_ids_; }  // of the part
  std::int64_t nearest() const;                      // of the free samples; there must be one
  std::int64_t farthest() const;                     // likewise

 private:
  // Above all distances: a sample has fewer than kMaxIds ids.
  static constexpr std::int32_t kTaken = 1 << 30;
  static_assert(kMaxIds * (kWeight + kSharedWeight) * 2 <= kTaken / 2);

  const Incidence& in_;
  std::vector<std::int32_t> nearer_;  // by id: what its users come nearer once the part has it
  std::vector<std::int32_t> first_distance_, distance_;
  std::vector<std::uint8_t> is_free_;
  std::vector<std::uint32_t> part_with_;  // by id
  std::uint32_t part_ = 0;
  std::int64_t num_ids_ = 0;
};

Grower::Grower(const Incidence& incidence, bool relative)
    : in_(incidence),
      nearer_(static_cast<std::size_t>(incidence.num_ids())),
      first_distance_(static_cast<std::size_t>(incidence.num_samples()), 0),
      distance_(first_distance_.size()),
      is_free_(first_distance_.size(), 1),
      part_with_(nearer_.size(), 0) {
  for (std::int64_t id = 0; id < in_.num_ids(); ++id) {
    nearer_[id] = kWeight + static_cast<std::int32_t>(kSharedWeight / in_.num_users(id));
  }
  for (std::int64_t s = 0; s < in_.num_samples(); ++s) {
    if (!relative) first_distance_[s] = in_.alone[s] * (kWeight + kSharedWeight);
    for (std::int64_t i = in_.id_begin[s]; i < in_.id_begin[s + 1]; ++i)
      first_distance_[s] += nearer_[in_.ids[i]];
  }
  if (relative) {
    for (std::int32_t& weight : nearer_) weight *= 2;
  }
}

void Grower::begin() {
  ++part_;
  num_ids_ = 0;
  for (std::size_t s = 0; s < distance_.size(); ++s)
    distance_[s] = is_free_[s] ? first_distance_[s] : kTaken;
}

void Grower::add(std::int64_t sample) {
  is_free_[sample] = 0;
  distance_[sample] = kTaken;
  num_ids_ += in_.alone[sample];
  for (std::int64_t i = in_.id_begin[sample]; i < in_.id_begin[sample + 1]; ++i) {
    const std::int32_t id = in_.ids[i];
    if (part_with_[id] == part_) continue;
    part_with_[id] = part_;
    ++num_ids_;
    const std::int32_t weight = nearer_[id];
    for (std::int64_t u = in_.sample_begin[id]; u < in_.sample_begin[id + 1]; ++u)
      distance_[in_.samples[u]] -= weight;
  }
}

std::int64_t Grower::nearest() const {
  std::int32_t least = kTaken;
  for (const std::int32_t distance : distance_) least = std::min(least, distance);
  return std::find(distance_.begin(), distance_.end(), least) - distance_.begin();
}

std::int64_t Grower::farthest() const {
  std::int64_t found = -1;
  for (std::int64_t s = 0; s < num_samples(); ++s) {
    if (is_free(s) && (found < 0 || distance_[s] > distance_[found])) found = s;
  }
  return found;
}

// The cheapest of several parts of `size` free samples, which are then no longer free.
std::vector<std::int64_t> cheapest_part(Grower& grower, std::int64_t size, std::int64_t num_tries,
                                        Random& random) {
  std::vector<std::int64_t> best, grown;
  std::int64_t least_ids = 0;
  for (std::int64_t attempt = 0; attempt < num_tries && size > 0; ++attempt) {
    std::int64_t next = random.below(grower.num_samples());
    while (!grower.is_free(next)) next = (next + 1) % grower.num_samples();
    grower.begin();
    grown.clear();
    for (;;) {
      grower.add(next);
      grown.push_back(next);
      if (static_cast<std::int64_t>(grown.size()) == size) break;
      next = grower.nearest();
    }
    grower.set_free(grown, true);
    if (best.empty() || grower.num_ids() < least_ids) {
      least_ids = grower.num_ids();
      best = grown;
    }
  }
  grower.set_free(best, false);
  return best;
}

}  // namespace

void grow_parts(const Incidence& incidence, const std::vector<std::int64_t>& part_begin,
                Random& random, std::vector<std::int64_t>& order) {
  Grower grower(incidence, /*relative=*/true);
  for (std::size_t part = 0; part + 1 < part_begin.size(); ++part) {
    for (std::int64_t at = part_begin[part]; at < part_begin[part + 1]; ++at) {
      if (at > part_begin[part]) {
        order[at] = grower.nearest();
      } else {
        order[at] = at == 0 ? random.below(grower.num_samples()) : grower.farthest();
        grower.begin();
      }
      grower.add(order[at]);
    }
  }
}

void grow_ends(const Incidence& incidence, const std::vector<std::int64_t>& part_begin,
               Random& random, std::vector<std::int64_t>& order) {
  Grower grower(incidence, /*relative=*/false);
  const std::size_t num_parts = part_begin.size() - 1;
  const std::int64_t num_tries = kTriesPerPart * std::min<std::int64_t>(num_parts, kMaxTriedParts);
  const auto first = cheapest_part(grower, part_begin[1], num_tries, random);
  const auto last =
      cheapest_part(grower, part_begin[num_parts] - part_begin[num_parts - 1], num_tries, random);
  auto at = std::copy(first.begin(), first.end(), order.begin());
  for (std::int64_t s = 0; s < incidence.num_samples(); ++s) {
    if (grower.is_free(s)) *at++ = s;
  }
  std::copy(last.begin(), last.end(), at);
}

}  // namespace nestpipe::clustering
