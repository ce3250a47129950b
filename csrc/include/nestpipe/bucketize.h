// Stable counting sort by small integers.
#pragma once

#include <cstdint>

namespace nestpipe {

// order lists the positions 0 .. size - 1 by bucket, ascending inside a bucket; counts[k] is the
// size of bucket k. Returns -1, or the first position whose bucket is outside [0, num_buckets);
// outputs are unspecified then.
std::int64_t bucketize(const std::int32_t* buckets, std::int64_t size, std::int64_t num_buckets,
                       std::int64_t* order, std::int64_t* counts);

}  // namespace nestpipe
