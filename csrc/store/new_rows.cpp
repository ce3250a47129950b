// Rows of keys that had none: numbered, then written in the order in which they lie.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "departure.h"
#include "missing.h"
#include "nestpipe/parallel.h"
#include "nestpipe/request_line.h"
#include "nestpipe/store.h"
#include "stream_rows.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kKeysPerTask = 2048;
constexpr std::uint32_t kRowsAhead = 12;  // Rows between a request for their lines and their use.
constexpr std::int64_t kFloatsPerLine = 16;
constexpr std::size_t kNumStatus = 5;  // Values of KeyStatus.

// A row to be written past the caches, from the first line of a buffer on.
class StagedRow {
 public:
  explicit StagedRow(std::int64_t num_floats)
      : memory_(static_cast<std::size_t>(num_floats + kFloatsPerLine)) {
    void* begin = memory_.data();
    std::size_t room = memory_.size() * sizeof(float);
    begin_ = static_cast<float*>(
        std::align(kLineBytes, static_cast<std::size_t>(num_floats) * sizeof(float), begin, room));
  }
  float* get() const { return begin_; }

 private:
  std::vector<float> memory_;
  float* begin_;
};

}  // namespace

// No rule and no quota keeps a key from getting a row.
bool EmbeddingStore::all_get_rows() const {
  return !evicts_ && std::all_of(tables_.begin(), tables_.end(), [](const auto& table) {
    return table->config.quota < 0 && table->config.admission.kind == AdmissionKind::kAll;
  });
}

// rows [m]: the numbers of the missing, should they all be distinct.
void EmbeddingStore::expect_rows(Missing* missing) const {
  const std::int64_t count = missing->count();
  const std::int64_t num_rows = num_rows_.load(std::memory_order_relaxed);
  missing->num_reused = std::min(count, free_rows_.size());
  if (count - missing->num_reused > std::int64_t{kNoRow} - num_rows) {
    missing->numbered = false;
    return;
  }
  free_rows_.lowest(missing->num_reused, missing->rows.get());
  const auto first = static_cast<std::uint32_t>(num_rows);
  parallel_ranges(count - missing->num_reused, kKeysPerTask, [&](std::int64_t begin, auto end) {
    for (std::int64_t i = begin; i < end; ++i) {
      missing->rows[missing->num_reused + i] = first + static_cast<std::uint32_t>(i);
    }
  });
}

// Which of the missing was expected to get a row.
std::uint32_t EmbeddingStore::number_of_entered(const Missing& missing, std::uint32_t found) const {
  const std::int64_t beyond = std::int64_t{found} - num_rows_.load(std::memory_order_relaxed);
  if (beyond >= 0) return static_cast<std::uint32_t>(missing.num_reused + beyond);
  const std::uint32_t* const rows = missing.rows.get();
  return static_cast<std::uint32_t>(std::lower_bound(rows, rows + missing.num_reused, found) -
                                    rows);
}

// Whether the missing have the rows that were expected, with memory for them. If not, they are
// numbered as others are.
bool EmbeddingStore::numbered_on_entry(Missing* missing) {
  if (!missing->numbered) return false;
  if (missing->repeats) {
    missing->numbered = false;
    std::fill_n(missing->rows.get(), missing->count(), kNoRow);
    return false;
  }
  missing->num_rows =
      num_rows_.load(std::memory_order_relaxed) + missing->count() - missing->num_reused;
  std::vector<std::atomic<std::int64_t>> num_new(tables_.size());
  if (tables_.size() == 1) {
    num_new[0] = missing->count();
  } else {
    parallel_ranges(missing->count(), kKeysPerTask, [&](std::int64_t begin, std::int64_t end) {
      std::vector<std::int64_t> own(tables_.size(), 0);
      for (std::int64_t i = begin; i < end; ++i)
        ++own[missing->table(static_cast<std::uint32_t>(i))];
      for (std::size_t t = 0; t < own.size(); ++t) num_new[t] += own[t];
    });
  }
  missing->sizes.clear();
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    missing->sizes.push_back(tables_[t]->size + num_new[t]);
  }
  missing->all_have_rows = true;
  reserve_rows(static_cast<std::uint64_t>(missing->num_rows));
  return true;
}

void EmbeddingStore::number_rows(Missing* missing, const Departure& departure) {
  missing->sizes.clear();
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    missing->sizes.push_back(tables_[t]->size - departure.size_of(t));
  }
  missing->num_rows = num_rows_.load(std::memory_order_relaxed);
  missing->num_reused = 0;
  const std::int64_t num_free = std::min<std::int64_t>(missing->count(), free_rows_.size());
  const Scratch<std::uint32_t> free(num_free);
  free_rows_.lowest(num_free, free.get());
  for (std::uint32_t i = 0; i < missing->count(); ++i) {
    if (missing->first[i] != i || missing->admitted[i] == 0) continue;
    std::int64_t& size = missing->sizes[missing->table(i)];
    const std::int64_t quota = tables_[missing->table(i)]->config.quota;
    if (quota >= 0 && size >= quota) continue;
    if (missing->num_reused < num_free) {
      missing->rows[i] = free[missing->num_reused++];
    } else if (missing->num_rows < std::int64_t{kNoRow}) {
      missing->rows[i] = static_cast<std::uint32_t>(missing->num_rows++);
    } else {
      continue;
    }
    ++size;
  }
  std::int64_t given = 0;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    given += missing->sizes[t] - tables_[t]->size + departure.size_of(t);
  }
  missing->all_have_rows = given == missing->count();
  reserve_rows(static_cast<std::uint64_t>(missing->num_rows));
}

// Throws std::bad_alloc where row numbers did not suffice.
void EmbeddingStore::check_numbers(const Missing& missing) const {
  if (missing.num_rows == std::int64_t{kNoRow} && !missing.all_have_rows) throw std::bad_alloc();
}

// Memory for row numbers below num_rows. Throws std::bad_alloc, with no row lost.
void EmbeddingStore::reserve_rows(std::uint64_t num_rows) {
  slabs_.reserve(num_rows);
  if (file_ != nullptr) records_.reserve(num_rows);
  ages_.reserve(num_rows);
  free_rows_.reserve(num_rows);
}

// Rows, records and embeddings of inserted keys; handles, status and counters of all missing ones.
void EmbeddingStore::write_new_rows(const Missing& missing, std::int64_t batch,
                                    const RetrievalSpan& out) {
  if (missing.count() == 0) return;
  const auto status_of = [&](std::uint32_t i) {
    const std::uint32_t first = missing.first[i];
    if (missing.rows[first] == kNoRow) {
      const bool admitted = missing.admitted.empty() || missing.admitted[first] != 0;
      return admitted ? KeyStatus::kRefused : KeyStatus::kNotAdmitted;
    }
    return first == i ? KeyStatus::kInserted : KeyStatus::kFound;
  };
  // Rows that were used before lie anywhere.
  const auto request_row = [&](std::uint32_t i) {
    const std::uint32_t number = missing.rows[i];
    if (number == kNoRow) return;
    request_line_to_write(record(number));
    const std::int64_t last = std::min<std::int64_t>(row_floats_, 8 * kFloatsPerLine);
    for (std::int64_t d = 0; d < last; d += kFloatsPerLine) {
      request_line_to_write(row(number) + d);
    }
  };
  const auto record_for = [&](std::uint32_t i) {
    const std::int64_t occurrences =
        missing.occurrences.empty() ? missing.own_count(i) : missing.occurrences[i];
    const std::int64_t before = missing.before.empty() ? 0 : missing.before[i];
    constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
    const std::int64_t sum = before > kLargest - occurrences ? kLargest : before + occurrences;
    return Record{missing.key(i), std::max<std::int64_t>(batch, -1), sum, missing.table(i)};
  };
  const EmbeddingWriter copy_out = writer(out.embeddings, missing.in.size);
  const std::int64_t stride_bytes = stride_floats_ * static_cast<std::int64_t>(sizeof(float));
  const bool stream =
      file_ == nullptr && worth_streaming(row(missing.rows[0] == kNoRow ? 0 : missing.rows[0]),
                                          stride_bytes, missing.count());
  std::vector<std::atomic<std::int64_t>> counted(tables_.size() * kNumStatus);
  const auto write = [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::int64_t> sums(counted.size(), 0);
    const StagedRow staged(stride_floats_);
    for (auto i = static_cast<std::uint32_t>(begin); i < static_cast<std::uint32_t>(end); ++i) {
      if (!stream && i + kRowsAhead < end) request_row(i + kRowsAhead);
      const std::uint32_t number = missing.rows[missing.first[i]];
      const std::int64_t j = missing.positions[i];
      out.handles[j] = number == kNoRow ? -1 : std::int64_t{number};
      const KeyStatus status = status_of(i);
      out.status[j] = static_cast<std::uint8_t>(status);
      if (missing.first[i] == i) {
        ++sums[static_cast<std::size_t>(missing.table(i)) * kNumStatus + out.status[j]];
      }
      if (status != KeyStatus::kInserted) continue;
      float* const made = stream ? staged.get() : row(number);
      initial_row(missing.table(i), missing.key(i), made);
      *(stream ? record_of(made) : record(number)) = record_for(i);
      if (stream) stream_row(made, stride_bytes, row(number));
      if (out.embeddings != nullptr) copy_out.to(made, j);
      *age(number) = age_of(batch);
    }
    if (stream || copy_out.stream) end_streaming();
    for (std::size_t s = 0; s < sums.size(); ++s) counted[s] += sums[s];
  };
  const auto handle = [&](std::int64_t i) {
    const std::uint32_t number = missing.rows[i];  // Of first ones; others have none.
    return number == kNoRow ? std::int64_t{-1} : std::int64_t{number};
  };
  for_row_ranges(missing.count(), kKeysPerTask / 8, true, handle, write);
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const auto count_of = [&](KeyStatus status) {
      return counted[t * kNumStatus + static_cast<std::size_t>(status)].load();
    };
    TableCounters& counters = tables_[t]->counters;
    counters.inserted += count_of(KeyStatus::kInserted);
    counters.refused += count_of(KeyStatus::kRefused);
    counters.not_admitted += count_of(KeyStatus::kNotAdmitted);
  }
}

// Embeddings of missing keys that write_new_rows left: repeated ones, and those without a row.
void EmbeddingStore::copy_others(const Missing& missing, const RetrievalSpan& out) const {
  if (missing.count() == 0 || missing.all_have_rows) return;
  const EmbeddingWriter copy_out = writer(out.embeddings, missing.in.size);
  parallel_ranges(missing.count(), kKeysPerTask / 8, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> words(static_cast<std::size_t>(embedding_words_));
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t j = missing.positions[i];
      if (out.status[j] == static_cast<std::uint8_t>(KeyStatus::kInserted)) continue;
      const float* from = words.data();
      if (out.handles[j] >= 0) {
        from = row(out.handles[j]);
      } else {
        absent_embedding(missing.in.tables[j], missing.in.keys[j], words.data());
      }
      copy_out.to(from, j);
    }
    copy_out.finish();
  });
}

}  // namespace nestpipe
