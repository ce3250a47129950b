// Stable counting sort by small integers, in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nestpipe/cuda/stream.h"

namespace nestpipe {
namespace cuda {

// All in device memory.
struct BucketizeOutput {
  std::int64_t* order;         // [size]
  std::int64_t* counts;        // [num_buckets]
  std::int64_t* bad_position;  // [1]: the first position whose bucket is out of range, or -1
};

// Bytes of device memory that a call needs while it runs.
std::size_t bucketize_work_bytes(std::int64_t size, std::int64_t num_buckets);

// The positions 0 .. size - 1 by bucket, ascending inside a bucket, and the buckets' sizes; where a
// bucket is outside [0, num_buckets) these are unspecified. size and num_buckets < 2^31. Does not
// synchronize.
void bucketize(const std::int32_t* buckets, std::int64_t size, std::int64_t num_buckets, void* work,
               const BucketizeOutput& output, Stream stream);

}  // namespace cuda
}  // namespace nestpipe
