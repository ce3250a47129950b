// Retrieval of keys with repetitions that all have rows: what a table that has been trained for a
// while sees.
//
// Each distinct key is looked up once. That its row was used is noted and not yet counted: its
// record lies anywhere in memory, beside what the update of the row reads and writes soon.
// update_pooled() of the same rows counts on the way. Whatever else looks at records or may change
// them counts first what is noted, so nobody can tell.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>

#include "nestpipe/dedup.h"
#include "nestpipe/parallel.h"
#include "nestpipe/request_line.h"
#include "nestpipe/store.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kRowsPerTask = 4096;
constexpr std::int64_t kAhead = 32;

// The occurrences of a call that are no padding: the call's own arrays, where none is.
class Kept {
 public:
  Kept(const KeySpan& in, const std::uint8_t* valid) : all_(in) {
    std::int64_t count = 0;
    for (std::int64_t j = 0; valid != nullptr && j < in.size; ++j) count += valid[j] != 0;
    if (valid == nullptr || count == in.size) return;
    keys_ = Scratch<std::int64_t>(count);
    tables_ = Scratch<std::int32_t>(count);
    slots_ = Scratch<std::int32_t>(count);
    for (std::int64_t j = 0, at = 0; j < in.size; ++j) {
      if (valid[j] == 0) continue;
      keys_[at] = in.keys[j];
      tables_[at++] = in.tables[j];
    }
    all_ = {keys_.get(), tables_.get(), count};
  }

  const KeySpan& span() const { return all_; }
  // Where slots of the kept ones go.
  std::int32_t* slots(std::int32_t* out) const { return slots_.empty() ? out : slots_.get(); }
  // From there to `out` [n], with -1 for padding.
  void spread(const std::uint8_t* valid, std::int64_t size, std::int32_t* out) const {
    if (slots_.empty()) return;
    for (std::int64_t j = 0, at = 0; j < size; ++j) out[j] = valid[j] == 0 ? -1 : slots_[at++];
  }

 private:
  KeySpan all_;
  Scratch<std::int64_t> keys_;
  Scratch<std::int32_t> tables_;
  Scratch<std::int32_t> slots_;
};

}  // namespace

std::int64_t EmbeddingStore::retrieve_occurrences(const KeySpan& in, const std::uint8_t* valid,
                                                  std::int64_t batch, const OccurrenceSpan& out,
                                                  RetrievalJournal* journal) {
  check_tables(in);
  if (in.size > std::numeric_limits<std::int32_t>::max()) {
    throw std::length_error("store: too many keys in a call");
  }
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  if (evicts_) return -1;
  const Kept kept(in, valid);
  const KeySpan& used = kept.span();
  Dedup distinct({used.keys, tables_.size() > 1 ? used.tables : nullptr, used.size});
  const std::int64_t num_rows = distinct.size();
  const Scratch<std::int64_t> positions(num_rows);
  auto use = std::make_shared<NotedUse>(num_rows, batch);
  distinct.write(positions.get(), kept.slots(out.slots), use->counts.get());
  parallel_ranges(num_rows, kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t u = begin; u < end; ++u) {
      out.keys[u] = used.keys[positions[u]];
      out.tables[u] = used.tables[positions[u]];
    }
  });
  search({out.keys, out.tables, num_rows}, out.handles);
  if (std::any_of(out.handles, out.handles + num_rows, [](std::int64_t h) { return h < 0; })) {
    return -1;
  }
  kept.spread(valid, in.size, out.slots);
  std::copy_n(out.handles, num_rows, use->handles.get());
  journal->counts.clear();
  journal->counters.clear();
  for (const auto& table : tables_) journal->counters.push_back(table->counters);
  journal->num_evicted = 0;
  journal->use = use;
  journal->sequence = ++sequence_;
  journal->newest_before = newest_;
  journal->last_batch_before = last_batch_;
  newest_ = journal->sequence;
  last_batch_ = std::max(last_batch_, batch);
  noted_ = std::move(use);
  has_noted_.store(true, std::memory_order_relaxed);
  return num_rows;
}

// Those of rows begin .. end - 1 that have not been counted yet.
void EmbeddingStore::count_use(NotedUse* use, std::int64_t begin, std::int64_t end) const {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t u = begin; u < end; ++u) {
    const std::int64_t count = std::exchange(use->counts[u], NotedUse::kCounted);
    if (count == NotedUse::kCounted) continue;
    Record* const row = record(use->handles[u]);
    use->last_used[u] = row->last_used;
    use->frequency[u] = row->frequency;
    if (use->batch >= 0) row->last_used = use->batch;
    row->frequency = row->frequency > kLargest - count ? kLargest : row->frequency + count;
  }
}

void EmbeddingStore::count_noted() const {
  if (noted_ == nullptr) return;
  NotedUse* const use = noted_.get();
  parallel_ranges(use->size, kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t u = begin; u < end; ++u) {
      if (u + kAhead < end) request_line_to_write(record(use->handles[u + kAhead]));
      count_use(use, u, u + 1);
    }
  });
  forget_noted();
}

void EmbeddingStore::forget_noted() const {
  noted_.reset();
  has_noted_.store(false, std::memory_order_relaxed);
}

std::unique_lock<std::shared_mutex> EmbeddingStore::own_if_noted(const std::int64_t* handles,
                                                                 std::int64_t size) const {
  // Not where a score function runs: stores that evict note nothing.
  if (!has_noted_.load(std::memory_order_relaxed)) return {};
  std::unique_lock<std::shared_mutex> lock(keys_mutex_);
  const auto bytes = static_cast<std::size_t>(size) * sizeof(std::int64_t);
  if (noted_ == nullptr || noted_->size != size ||
      std::memcmp(noted_->handles.get(), handles, bytes) != 0) {
    return {};
  }
  return lock;
}

}  // namespace nestpipe
