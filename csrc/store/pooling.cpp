// Pooling and updating rows where they lie, without a copy of them.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "nestpipe/lookup_pool.h"
#include "nestpipe/parallel.h"
#include "nestpipe/request_line.h"
#include "nestpipe/row_tasks.h"
#include "nestpipe/row_update.h"
#include "nestpipe/store.h"
#include "search_range.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kHandlesPerTask = 4096;
constexpr std::int64_t kRowsAhead = 8;

void check_in_place(bool in_place, const char* operation) {
  if (in_place) return;
  throw std::invalid_argument(std::string(operation) +
                              ": rows must be float32 and in memory; gather them instead");
}

}  // namespace

void EmbeddingStore::pool(const std::int64_t* handles, const KeySpan& in, const BagList& bags,
                          const std::vector<SegmentOutput>& outs) const {
  check_in_place(pools_in_place(), "pool");
  check_tables(in);
  check_handles(handles, in.size);
  std::vector<const float*> rows(static_cast<std::size_t>(in.size));
  std::vector<std::int64_t> absent;
  for (std::int64_t j = 0; j < in.size; ++j) {
    if (handles[j] < 0) absent.push_back(j);
  }
  std::vector<float> initial(absent.size() * static_cast<std::size_t>(dim_));
  const auto make = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      float* const embedding = initial.data() + i * dim_;
      absent_embedding(in.tables[absent[i]], in.keys[absent[i]], embedding);
      rows[absent[i]] = embedding;
    }
  };
  parallel_ranges(static_cast<std::int64_t>(absent.size()), rows_per_task(dim_), make);
  parallel_ranges(in.size, kHandlesPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) {
      if (handles[j] >= 0) rows[j] = row(handles[j]);
    }
  });
  RowMatrix matrix;
  matrix.num_rows = in.size;
  matrix.dim = dim_;
  matrix.pointers = rows.data();
  lookup_pool_forward(matrix, bags, outs);
}

bool EmbeddingStore::pool_keys(const KeySpan& in, const std::uint8_t* valid, const BagList& bags,
                               const std::vector<SegmentOutput>& outs) const {
  check_in_place(pools_in_place(), "pool_keys");
  check_tables(in);
  if (in.size != bags.num_occurrences) {
    throw std::invalid_argument("pool_keys: expected a key for each of " +
                                std::to_string(bags.num_occurrences) + " occurrences, got " +
                                std::to_string(in.size));
  }
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  std::atomic<bool> all_there{true};
  const auto find_rows = [&](std::int64_t begin, std::int64_t end, const float** rows) {
    std::vector<std::uint32_t> numbers(static_cast<std::size_t>(end - begin));
    search_range(in, begin, end,
                 [&](std::int64_t j, std::uint32_t number) { numbers[j - begin] = number; });
    bool there = true;
    for (std::int64_t j = begin; j < end; ++j) {
      const std::uint32_t number = numbers[j - begin];
      const bool padding = valid != nullptr && valid[j] == 0;
      there &= padding | (number != kNoRow);
      rows[j - begin] = padding || number == kNoRow ? nullptr : row(number);
    }
    if (!there) all_there.store(false, std::memory_order_relaxed);
    return there;
  };
  lookup_pool_by_ranges(bags, dim_, outs, find_rows);
  return all_there.load();
}

void EmbeddingStore::update_pooled(const std::int64_t* handles, std::int64_t size,
                                   const BagList& bags, const std::vector<SegmentGradient>& grads,
                                   const UpdateArguments& arguments,
                                   const UpdateSettings& settings) {
  check_in_place(pools_in_place(), "update_pooled");
  check_handles(handles, size);
  for (const std::int32_t mode : bags.segment_modes) {
    if (mode == static_cast<std::int32_t>(PoolMode::kMax)) {
      throw std::invalid_argument("update_pooled: pooling max is not supported; gather the rows");
    }
  }
  std::vector<float*> rows(static_cast<std::size_t>(size));
  std::vector<std::uint8_t> mask;
  for (std::int64_t j = 0; j < size; ++j) {
    if (handles[j] >= 0) continue;
    if (mask.empty()) mask.assign(static_cast<std::size_t>(size), 1);
    mask[j] = 0;
  }
  for (std::size_t j = 0; j < mask.size(); ++j) {
    if (arguments.mask != nullptr && arguments.mask[j] == 0) mask[j] = 0;
  }
  parallel_ranges(size, kHandlesPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) {
      rows[j] = handles[j] < 0 ? nullptr : row(handles[j]);
    }
  });
  UpdateArguments a = arguments;
  a.pointers = rows.data();
  a.num_rows = size;
  a.row_floats = stride_floats_;
  a.dim = dim_;
  a.data_type = data_type_;
  if (!mask.empty()) a.mask = mask.data();
  RowMatrix matrix;
  matrix.num_rows = size;
  matrix.stride = stride_floats_;
  matrix.dim = dim_;
  matrix.pointers = rows.data();
  const UpdateRows update = row_updater(a, settings);
  const std::unique_lock<std::shared_mutex> lock = own_if_noted(handles, size);
  if (!lock.owns_lock()) return lookup_pool_gradients(matrix, bags, grads, update);
  NotedUse* const use = noted_.get();
  const auto update_and_count = [&](std::int64_t begin, std::int64_t end, const float* gradients) {
    update(begin, end, gradients);
    count_use(use, begin, end);
    // Of those that come next: lines behind long rows are not requested with these.
    for (std::int64_t u = end; u < std::min(size, 2 * end - begin); ++u) {
      request_line_to_write(record(handles[u]));
    }
  };
  lookup_pool_gradients(matrix, bags, grads, update_and_count);
  forget_noted();
}

std::int64_t EmbeddingStore::sequence() const {
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  return sequence_;
}

}  // namespace nestpipe
