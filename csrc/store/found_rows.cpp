// Keys of a retrieval that have rows: their metadata, and copies of their rows on the way.
#include <algorithm>
#include <limits>

#include "nestpipe/parallel.h"
#include "nestpipe/request_line.h"
#include "nestpipe/store.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kKeysPerTask = 2048;
constexpr std::int64_t kFloatsPerLine = 16;
constexpr std::int64_t kMaxLines =
    8;  // Of a row that are requested; the others follow by themselves.

// Of numbers that are not negative, at most the largest there is: occurrences never wrap around.
std::int64_t sum_of(std::int64_t a, std::int64_t b) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  return a > kLargest - b ? kLargest : a + b;
}

// Calls visit(j) for j in [0, size), or downwards, so that visits with the same owner[j] keep their
// order: each thread visits the owners that fall to it, then calls done(). Negative owners are
// skipped. request(owner[j]) comes a block of visits earlier.
template <typename Request, typename Visit, typename Done>
void for_each_in_owner_order(const std::int64_t* owner, std::int64_t size, bool backwards,
                             const Request& request, const Visit& visit, const Done& done) {
  constexpr int kBlock = 32;
  const std::int64_t parts =
      std::max<std::int64_t>(1, std::min<std::int64_t>(num_threads(), size / kKeysPerTask));
  const auto part_of = [parts](std::int64_t owner_number) {
    const std::uint32_t spread = static_cast<std::uint32_t>(owner_number) * 0x9E3779B1u;
    return static_cast<std::int64_t>((spread * static_cast<std::uint64_t>(parts)) >> 32);
  };
  parallel_tasks(parts, [&](std::int64_t part) {
    std::int64_t blocks[2][kBlock];
    int counts[2] = {0, 0};
    int current = 0;
    for (std::int64_t i = 0; i < size || counts[current ^ 1] > 0; current ^= 1) {
      // Written always, kept where it counts: no branch to mispredict.
      int count = 0;
      for (; i < size && count < kBlock; ++i) {
        const std::int64_t j = backwards ? size - 1 - i : i;
        blocks[current][count] = j;
        count += (owner[j] >= 0) & (parts == 1 || part_of(owner[j]) == part);
      }
      counts[current] = count;
      // In turn, so that lines are on their way all the time.
      for (int k = 0; k < count || k < counts[current ^ 1]; ++k) {
        if (k < count) request(owner[blocks[current][k]]);
        if (k < counts[current ^ 1]) visit(blocks[current ^ 1][k]);
      }
      counts[current ^ 1] = 0;
    }
    done();
  });
}

}  // namespace

// Metadata of keys that have rows; what it was goes into the journal, if there is one, which says
// -1 and 0 so far. Rows in memory are copied out at once, as they share lines with their records.
void EmbeddingStore::use_found(const RetrievalSpan& out, std::int64_t size,
                               const std::int64_t* counts, std::int64_t batch,
                               const RetrievalJournal* journal) {
  const auto use = [&](Record* used, std::int64_t j) {
    if (journal != nullptr) {
      journal->last_used[j] = used->last_used;
      journal->frequency[j] = used->frequency;
    }
    if (batch >= 0) {
      used->last_used = batch;
      if (evicts_) *age(out.handles[j]) = age_of(batch);
    }
    used->frequency = sum_of(used->frequency, counts == nullptr ? 1 : counts[j]);
  };
  if (out.embeddings == nullptr || file_ != nullptr) {
    const auto request = [this](std::int64_t handle) { request_line_to_write(record(handle)); };
    const auto visit = [&](std::int64_t j) { use(record(out.handles[j]), j); };
    return for_each_in_owner_order(out.handles, size, false, request, visit, [] {});
  }
  const EmbeddingWriter copy_out = writer(out.embeddings, size);
  const std::int64_t requested = std::min(embedding_words_, kMaxLines * kFloatsPerLine);
  const auto request = [this, requested](std::int64_t handle) {
    float* const begin = row(handle);
    for (std::int64_t d = 0; d < requested; d += kFloatsPerLine) request_line_early(begin + d);
    request_line_to_write(record_of(begin));
  };
  const auto visit = [&](std::int64_t j) {
    float* const found = row(out.handles[j]);
    copy_out.to(found, j);
    use(record_of(found), j);
  };
  for_each_in_owner_order(out.handles, size, false, request, visit, [&] { copy_out.finish(); });
}

void EmbeddingStore::restore_metadata(const RetrievalSpan& out, std::int64_t size,
                                      const RetrievalJournal& journal) {
  const NotedUse* const use = journal.use.get();
  const std::int64_t* const last_used = (use ? use->last_used : journal.last_used).get();
  const std::int64_t* const frequency = (use ? use->frequency : journal.frequency).get();
  const auto request = [this](std::int64_t handle) { request_line_to_write(record(handle)); };
  const auto restore = [&](std::int64_t j) {
    Record* const used = record(out.handles[j]);
    set_last_used(out.handles[j], last_used[j]);
    used->frequency = frequency[j];
  };
  for_each_in_owner_order(out.handles, size, true, request, restore, [] {});
}

}  // namespace nestpipe
