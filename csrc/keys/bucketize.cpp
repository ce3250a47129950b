// Bucketize: per part a histogram, offsets by (bucket, part), then each part places its positions.
// Any number of parts gives the same order, because parts are ranges of ascending positions.
#include "nestpipe/bucketize.h"

#include <vector>

#include "nestpipe/parallel.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kMinPartSize = 16384;

// Parts worth having: enough work each, and histograms no larger than the input.
std::int64_t choose_parts(std::int64_t size, std::int64_t num_buckets) {
  std::int64_t parts = num_threads();
  if (parts > size / kMinPartSize) parts = size / kMinPartSize;
  if (num_buckets > 0 && parts > size / num_buckets) parts = size / num_buckets;
  return parts < 1 ? 1 : parts;
}

}  // namespace

std::int64_t bucketize(const std::int32_t* buckets, std::int64_t size, std::int64_t num_buckets,
                       std::int64_t* order, std::int64_t* counts) {
  const std::int64_t num_parts = choose_parts(size, num_buckets);
  const auto begin_of = [&](std::int64_t part) { return size * part / num_parts; };
  std::vector<std::int64_t> next(static_cast<std::size_t>(num_parts * num_buckets), 0);
  std::vector<std::int64_t> first_bad(static_cast<std::size_t>(num_parts), -1);

  parallel_tasks(num_parts, [&](std::int64_t part) {
    std::int64_t* histogram = next.data() + part * num_buckets;
    const std::int64_t end = begin_of(part + 1);
    for (std::int64_t i = begin_of(part); i < end; ++i) {
      if (buckets[i] < 0 || buckets[i] >= num_buckets) {
        first_bad[part] = i;
        return;
      }
      ++histogram[buckets[i]];
    }
  });
  for (const std::int64_t position : first_bad) {
    if (position >= 0) return position;
  }

  std::int64_t offset = 0;
  for (std::int64_t bucket = 0; bucket < num_buckets; ++bucket) {
    const std::int64_t start = offset;
    for (std::int64_t part = 0; part < num_parts; ++part) {
      std::int64_t& entry = next[part * num_buckets + bucket];
      const std::int64_t in_part = entry;
      entry = offset;
      offset += in_part;
    }
    counts[bucket] = offset - start;
  }
  parallel_tasks(num_parts, [&](std::int64_t part) {
    std::int64_t* place = next.data() + part * num_buckets;
    const std::int64_t end = begin_of(part + 1);
    for (std::int64_t i = begin_of(part); i < end; ++i) order[place[buckets[i]]++] = i;
  });
  return -1;
}

}  // namespace nestpipe
