// The CUDA operations as plain functions for ctypes: "device memory" is the host's. Each returns
// null, or what went wrong.
#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "nestpipe/cuda/bucketize.h"
#include "nestpipe/cuda/dedup.h"
#include "nestpipe/cuda/emulated.h"
#include "nestpipe/cuda/rows.h"

namespace {

template <typename Body>
const char* told(const Body& body) {
  static std::string message;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

// Working memory with nothing useful in it, as a pool of device memory hands it out.
std::unique_ptr<unsigned char[]> used_memory(std::size_t bytes) {
  std::unique_ptr<unsigned char[]> memory(new unsigned char[bytes]);
  std::memset(memory.get(), 0xA5, bytes);
  return memory;
}

}  // namespace

using namespace nestpipe;

extern "C" {

void set_schedule(std::uint64_t seed, int resident_blocks, int yield_percent) {
  emulated_cuda::schedule() = {seed, resident_blocks, yield_percent};
}

const char* emulated_dedup(const std::int64_t* keys, const std::int32_t* tables, std::int64_t size,
                           std::int64_t* unique_index, std::int32_t* inverse, std::int64_t* counts,
                           std::int64_t* num_unique) {
  return told([&] {
    const auto work = used_memory(cuda::dedup_work_bytes(size));
    cuda::dedup({keys, tables, size}, work.get(), {unique_index, inverse, counts, num_unique},
                nullptr);
  });
}

const char* emulated_bucketize(const std::int32_t* buckets, std::int64_t size,
                               std::int64_t num_buckets, std::int64_t* order, std::int64_t* counts,
                               std::int64_t* bad_position) {
  return told([&] {
    const auto work = used_memory(cuda::bucketize_work_bytes(size, num_buckets));
    cuda::bucketize(buckets, size, num_buckets, work.get(), {order, counts, bad_position}, nullptr);
  });
}

const char* emulated_gather_rows(const float* rows, std::int64_t num_rows, std::int64_t row_stride,
                                 std::int64_t dim, const std::int64_t* index, std::int64_t size,
                                 float* out, std::int64_t out_stride, int data_type,
                                 std::int64_t* bad_position) {
  return told([&] {
    cuda::gather_rows({rows, num_rows, row_stride, dim, index, size, out, out_stride,
                       static_cast<DataType>(data_type)},
                      bad_position, nullptr);
  });
}

const char* emulated_row_sync(const float* source, std::int64_t source_rows, float* target,
                              std::int64_t target_rows, std::int64_t row_floats,
                              const std::int64_t* source_index, const std::int64_t* target_index,
                              std::int64_t size, std::int64_t* bad_position) {
  return told([&] {
    cuda::row_sync(
        {source, source_rows, target, target_rows, row_floats, source_index, target_index, size},
        bad_position, nullptr);
  });
}

// kind: 0 scatter_rows, 1 scatter_add_rows, 2 zero_rows.
const char* emulated_scatter_rows(int kind, float* target, std::int64_t num_rows,
                                  std::int64_t target_stride, std::int64_t dim,
                                  const std::int64_t* index, std::int64_t size, const float* source,
                                  std::int64_t source_stride, std::int64_t* bad_position) {
  return told([&] {
    const ScatterRows a = {target, num_rows, target_stride, dim,
                           index,  size,     source,        source_stride};
    if (kind == 0) cuda::scatter_rows(a, bad_position, nullptr);
    if (kind == 1) cuda::scatter_add_rows(a, bad_position, nullptr);
    if (kind == 2) cuda::zero_rows(a, bad_position, nullptr);
  });
}

}  // extern "C"
