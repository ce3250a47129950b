// Retrieval of keys with repetitions that all have rows: what a table that has been trained for a
// while sees. Row numbers tell equal keys: a row's record holds, for the time of a call, the row's
// place among the rows of the call, and is read for its metadata anyway.
#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "nestpipe/parallel.h"
#include "nestpipe/request_line.h"
#include "nestpipe/store.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kOccurrencesPerPart = 16384;
constexpr std::int64_t kMaxParts = 16;
constexpr std::int64_t kOccurrencesPerTask = 16384;
constexpr std::int64_t kAhead = 64;

// Which part counts a row's occurrences.
std::int64_t part_of(std::int64_t handle, std::int64_t num_parts) {
  const std::uint32_t spread = static_cast<std::uint32_t>(handle) * 0x9E3779B1u;
  return static_cast<std::int64_t>((spread * static_cast<std::uint64_t>(num_parts)) >> 32);
}

}  // namespace

// The occurrences that fall to one part, ascending, and the rows it has met, in order. Parts write
// to nothing that they share.
struct EmbeddingStore::UsedRows {
  std::int64_t num_own = 0;
  std::unique_ptr<std::uint32_t[]> own;     // [num_own] positions in the call
  std::unique_ptr<std::uint32_t[]> places;  // [num_own] which of the rows
  std::vector<std::int64_t> handles;
  std::vector<std::int64_t> last_used;  // before the call
  std::vector<std::int64_t> frequency;  // before the call

  std::int64_t size() const { return static_cast<std::int64_t>(handles.size()); }
};

std::int64_t EmbeddingStore::retrieve_occurrences(const KeySpan& in, const std::uint8_t* valid,
                                                  std::int64_t batch, const OccurrenceSpan& out,
                                                  RetrievalJournal* journal) {
  check_tables(in);
  if (in.size > std::numeric_limits<std::int32_t>::max()) {
    throw std::length_error("store: too many keys in a call");
  }
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  if (evicts_) return -1;
  std::vector<std::int64_t> handles(static_cast<std::size_t>(in.size));
  search(in, handles.data());
  for (std::int64_t j = 0; j < in.size; ++j) {
    if (valid != nullptr && valid[j] == 0) {
      handles[j] = -1;
    } else if (handles[j] < 0) {
      return -1;
    }
  }
  const std::int64_t num_parts = std::max<std::int64_t>(
      1, std::min({std::int64_t{num_threads()}, kMaxParts, in.size / kOccurrencesPerPart}));
  std::vector<UsedRows> parts(static_cast<std::size_t>(num_parts));
  parallel_tasks(num_parts, [&](std::int64_t part) {
    UsedRows used = use_occurrences(handles, batch, part, num_parts);
    parts[part] = std::move(used);
  });
  std::vector<std::int64_t> starts = {0};
  for (const UsedRows& part : parts) starts.push_back(starts.back() + part.size());
  const std::int64_t num_rows = starts.back();
  journal->last_used = Scratch<std::int64_t>(num_rows);
  journal->frequency = Scratch<std::int64_t>(num_rows);
  parallel_tasks(num_parts, [&](std::int64_t part) {
    const UsedRows& used = parts[part];
    std::copy(used.handles.begin(), used.handles.end(), out.handles + starts[part]);
    std::copy(used.last_used.begin(), used.last_used.end(),
              journal->last_used.get() + starts[part]);
    std::copy(used.frequency.begin(), used.frequency.end(),
              journal->frequency.get() + starts[part]);
  });
  parallel_ranges(in.size, kOccurrencesPerTask, [&](std::int64_t begin, std::int64_t end) {
    if (valid != nullptr) std::fill(out.slots + begin, out.slots + end, -1);
    for (std::int64_t part = 0; part < num_parts; ++part) {
      const UsedRows& used = parts[part];
      const std::uint32_t* const last = used.own.get() + used.num_own;
      const std::uint32_t* position =
          std::lower_bound(static_cast<const std::uint32_t*>(used.own.get()), last, begin);
      for (; position != last && *position < end; ++position) {
        out.slots[*position] =
            static_cast<std::int32_t>(starts[part] + used.places[position - used.own.get()]);
      }
    }
  });
  parallel_ranges(num_rows, kOccurrencesPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t u = begin; u < end; ++u) {
      if (u + kAhead < end) request_line(record(out.handles[u + kAhead]));
      out.keys[u] = record(out.handles[u])->key;
      out.tables[u] = record(out.handles[u])->table;
    }
  });
  journal->counts.clear();
  journal->counters.clear();
  for (const auto& table : tables_) journal->counters.push_back(table->counters);
  journal->num_evicted = 0;
  journal->sequence = ++sequence_;
  journal->newest_before = newest_;
  journal->last_batch_before = last_batch_;
  newest_ = journal->sequence;
  last_batch_ = std::max(last_batch_, batch);
  return num_rows;
}

// Numbers the part's rows as they are met, notes their metadata and counts their occurrences.
EmbeddingStore::UsedRows EmbeddingStore::use_occurrences(const std::vector<std::int64_t>& handles,
                                                         std::int64_t batch, std::int64_t part,
                                                         std::int64_t num_parts) {
  const auto size = static_cast<std::int64_t>(handles.size());
  UsedRows used;
  used.own.reset(new std::uint32_t[size + 1]);
  std::uint32_t* const own = used.own.get();
  std::int64_t num_own = 0;
  for (std::int64_t j = 0; j < size; ++j) {  // Without a branch: whose a row is, is a coin toss.
    own[num_own] = static_cast<std::uint32_t>(j);
    num_own += (handles[j] >= 0) & (part_of(handles[j], num_parts) == part);
  }
  used.num_own = num_own;
  used.places.reset(new std::uint32_t[num_own]);
  for (std::vector<std::int64_t>* list : {&used.handles, &used.last_used, &used.frequency}) {
    list->reserve(static_cast<std::size_t>(num_own / 2 + 64));
  }
  for (std::int64_t i = 0; i < num_own; ++i) {
    if (i + kAhead < num_own) request_line_to_write(record(handles[own[i + kAhead]]));
    const std::int64_t handle = handles[own[i]];
    Record* const row = record(handle);
    std::int64_t place = row->mark;
    if (place < 0 || place >= used.size() || used.handles[place] != handle) {
      place = used.size();
      used.handles.push_back(handle);
      used.last_used.push_back(row->last_used);
      used.frequency.push_back(row->frequency);
      row->mark = static_cast<std::int32_t>(place);
      if (batch >= 0) row->last_used = batch;
    }
    if (row->frequency < std::numeric_limits<std::int64_t>::max()) ++row->frequency;
    used.places[i] = static_cast<std::uint32_t>(place);
  }
  return used;
}

}  // namespace nestpipe
