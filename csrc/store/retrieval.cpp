// Retrieval: found keys are used, absent ones get rows as admission, eviction and quotas allow;
// undo.
//
// Absent keys take these steps, none of which depends on the number of threads:
//   1. grouped by shard, each key enters its index with its position among the missing as
//      provisional row number; a key that is there already is a repetition of an earlier one;
//   2. admission decides from the counts; one thread adds up how many rows each table needs;
//   3. the rows that go are chosen (eviction.cpp);
//   4. one thread numbers the rows in input order, within the quotas, and makes room for them;
//   5. keys that stay without a row are counted;
//   6. grouped by shard, provisional numbers become row numbers, keys without a row leave the
//   index,
//      and rows that go leave it, too;
//   7. rows and records are written.
// Whatever fails does so in steps 1 to 5, whose effects are then taken back.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "departure.h"
#include "missing.h"
#include "nestpipe/parallel.h"
#include "nestpipe/store.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kKeysPerTask = 2048;
// Keys between a request for a cache line and its use.
constexpr std::int64_t kAhead = 16;
constexpr std::uint32_t kRowsAhead = 12;
constexpr std::int64_t kFloatsPerLine = 16;
constexpr std::size_t kNumStatus = 5;  // Values of KeyStatus.

// Of numbers that are not negative, at most the largest there is: occurrences never wrap around.
std::int64_t sum_of(std::int64_t a, std::int64_t b) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  return a > kLargest - b ? kLargest : a + b;
}

// Calls visit(j) for j in [0, size), or downwards, so that visits with the same owner[j] keep their
// order: each thread visits the owners that fall to it. Negative owners are skipped.
// prefetch(owner[j]) comes a block of visits earlier.
template <typename Prefetch, typename Visit>
void for_each_in_owner_order(const std::int64_t* owner, std::int64_t size, bool backwards,
                             const Prefetch& prefetch, const Visit& visit) {
  constexpr int kBlock = 64;
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
      for (int k = 0; k < count; ++k) prefetch(owner[blocks[current][k]]);
      for (int k = 0; k < counts[current ^ 1]; ++k) visit(blocks[current ^ 1][k]);
      counts[current ^ 1] = 0;
    }
  });
}

}  // namespace

void EmbeddingStore::retrieve(const KeySpan& in, const std::int64_t* counts, std::int64_t batch,
                              const ScoreFunction& score, const RetrievalSpan& out,
                              RetrievalJournal* journal) {
  check_tables(in);
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  if (batch >= 0) free_limbo(batch - 2);
  journal->last_used = Scratch<std::int64_t>(in.size);
  journal->frequency = Scratch<std::int64_t>(in.size);
  journal->counters.clear();
  for (const auto& table : tables_) journal->counters.push_back(table->counters);
  search(in, out.handles);
  Missing missing(in);
  parallel_ranges(in.size, kKeysPerTask, [&](std::int64_t begin, std::int64_t end) {
    std::memset(out.status + begin, static_cast<int>(KeyStatus::kFound),
                static_cast<std::size_t>(end - begin));
    std::fill(journal->last_used.get() + begin, journal->last_used.get() + end, -1);
    std::fill(journal->frequency.get() + begin, journal->frequency.get() + end, 0);
  });
  collect_missing(out.handles, &missing);
  use_found(out, in.size, counts, batch, *journal);
  Departure departure;
  try {
    enter_provisionally(&missing);
    admit(&missing, counts);
    departure = plan_departure(missing.num_new, batch, score);
    number_rows(&missing, departure);
    limbo_.reserve(limbo_.size() + 1);
    count_absent(missing, journal);
  } catch (...) {
    restore_counts(journal->counts);
    withdraw(missing);
    restore_metadata(out, in.size, *journal);
    throw;
  }
  journal->sequence = ++sequence_;
  journal->newest_before = newest_;
  journal->last_batch_before = last_batch_;
  journal->num_evicted = static_cast<std::int64_t>(departure.leaving.size());
  newest_ = journal->sequence;
  last_batch_ = std::max(last_batch_, batch);
  take_numbers(missing);
  settle(missing);
  depart(&departure, batch, journal->sequence);
  write_new_rows(missing, batch, out);
  const bool all_new = missing.count() == in.size && missing.all_have_rows;
  if (out.embeddings != nullptr && !all_new) {
    copy_embeddings(out.handles, in, out.status, out.embeddings);
  }
}

// Metadata of keys that have rows; what it was goes into the journal, which says -1 and 0 so far.
void EmbeddingStore::use_found(const RetrievalSpan& out, std::int64_t size,
                               const std::int64_t* counts, std::int64_t batch,
                               const RetrievalJournal& journal) {
  const auto request_record = [this](std::int64_t handle) {
    __builtin_prefetch(record(handle), 1);
  };
  for_each_in_owner_order(out.handles, size, false, request_record, [&](std::int64_t j) {
    Record* const used = record(out.handles[j]);
    journal.last_used[j] = used->last_used;
    journal.frequency[j] = used->frequency;
    if (batch >= 0) set_last_used(out.handles[j], batch);
    used->frequency = sum_of(used->frequency, counts == nullptr ? 1 : counts[j]);
  });
}

void EmbeddingStore::restore_metadata(const RetrievalSpan& out, std::int64_t size,
                                      const RetrievalJournal& journal) {
  const auto request_record = [this](std::int64_t handle) {
    __builtin_prefetch(record(handle), 1);
  };
  for_each_in_owner_order(out.handles, size, true, request_record, [&](std::int64_t j) {
    Record* const used = record(out.handles[j]);
    set_last_used(out.handles[j], journal.last_used[j]);
    used->frequency = journal.frequency[j];
  });
}

void EmbeddingStore::admit(Missing* missing, const std::int64_t* counts) {
  const std::uint32_t count = missing->count();
  missing->occurrences = Scratch<std::int64_t>(count);
  missing->admitted = Scratch<std::uint8_t>(count);
  std::vector<std::atomic<std::int64_t>> num_new(tables_.size());
  parallel_ranges(count, kKeysPerTask, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::int64_t> firsts(tables_.size(), 0);
    for (auto i = static_cast<std::uint32_t>(begin); i < static_cast<std::uint32_t>(end); ++i) {
      missing->occurrences[i] = counts == nullptr ? 1 : counts[missing->positions[i]];
      missing->admitted[i] = 1;
      firsts[missing->table(i)] += missing->first[i] == i;
    }
    for (std::size_t t = 0; t < firsts.size(); ++t) num_new[t] += firsts[t];
  });
  missing->num_new.assign(num_new.begin(), num_new.end());
  for (std::uint32_t i = 0; missing->repeats && i < count; ++i) {
    if (missing->first[i] == i) continue;
    std::int64_t& sum = missing->occurrences[missing->first[i]];
    sum = sum_of(sum, missing->occurrences[i]);
  }
  const auto has_rule = [](const std::unique_ptr<Table>& table) {
    return table->config.admission.kind != AdmissionKind::kAll;
  };
  if (std::none_of(tables_.begin(), tables_.end(), has_rule)) return;
  missing->before.assign(count, 0);
  {
    parallel_ranges(count, kKeysPerTask / 4, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = static_cast<std::uint32_t>(begin); i < static_cast<std::uint32_t>(end); ++i) {
        if (missing->first[i] != i) continue;
        const AdmissionCounts& known = tables_[missing->table(i)]->counts;
        missing->before[i] = known.count(missing->hashes[i], missing->key(i));
        missing->admitted[i] =
            known.admits(missing->hashes[i], sum_of(missing->before[i], missing->occurrences[i]));
      }
    });
  }
  missing->num_new.assign(tables_.size(), 0);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (missing->first[i] == i) missing->num_new[missing->table(i)] += missing->admitted[i];
  }
}

void EmbeddingStore::number_rows(Missing* missing, const Departure& departure) {
  missing->sizes.clear();
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    missing->sizes.push_back(tables_[t]->size - departure.size_of(t));
  }
  missing->num_rows = num_rows_.load(std::memory_order_relaxed);
  missing->num_free = num_free_;
  for (std::uint32_t i = 0; i < missing->count(); ++i) {
    if (missing->first[i] != i || missing->admitted[i] == 0) continue;
    std::int64_t& size = missing->sizes[missing->table(i)];
    const std::int64_t quota = tables_[missing->table(i)]->config.quota;
    if (quota >= 0 && size >= quota) continue;
    if (missing->num_free > 0) {
      missing->rows[i] = *free_row_number(--missing->num_free);
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

// Memory for row numbers below num_rows. Throws std::bad_alloc, with no row lost.
void EmbeddingStore::reserve_rows(std::uint64_t num_rows) {
  slabs_.reserve(num_rows);
  records_.reserve(num_rows);
  ages_.reserve(num_rows);
  free_rows_.reserve(num_rows);
}

// Counts keys that stay without a row, and remembers what is forgotten about those that get one.
void EmbeddingStore::count_absent(const Missing& missing, RetrievalJournal* journal) {
  journal->counts.clear();
  const auto counts_keys = [](const std::unique_ptr<Table>& table) {
    return table->counts.counting();
  };
  if (std::none_of(tables_.begin(), tables_.end(), counts_keys)) return;
  std::vector<CountChange>& changes = journal->counts;
  changes.assign(missing.count(), CountChange{0, -1, 0});
  const auto add = [&](std::uint32_t i) {
    const std::uint32_t before = tables_[missing.table(i)]->counts.add(
        missing.hashes[i], missing.key(i), missing.occurrences[i]);
    changes[i] = CountChange{missing.key(i), missing.table(i), before};
  };
  for (std::uint32_t i = 0; i < missing.count(); ++i) {
    if (missing.first[i] != i || missing.rows[i] != kNoRow) continue;
    AdmissionCounts& counts = tables_[missing.table(i)]->counts;
    if (!counts.filtering()) continue;
    counts.reserve(missing.hashes[i]);
    add(i);
  }
  missing.by_shard.for_each([](std::uint32_t) {},
                            [&](std::uint32_t i) {
                              const AdmissionCounts& counts = tables_[missing.table(i)]->counts;
                              if (missing.first[i] != i || !counts.counting() || counts.filtering())
                                return;
                              if (missing.rows[i] == kNoRow) add(i);
                            });
  // From here on nothing fails.
  missing.by_shard.for_each(
      [](std::uint32_t) {},
      [&](std::uint32_t i) {
        AdmissionCounts& counts = tables_[missing.table(i)]->counts;
        if (missing.first[i] != i || missing.rows[i] == kNoRow || counts.filtering()) return;
        if (missing.before[i] == 0) return;
        const std::uint32_t before = counts.forget(missing.hashes[i], missing.key(i));
        changes[i] = CountChange{missing.key(i), missing.table(i), before};
      });
  const auto unchanged = [](const CountChange& change) { return change.table < 0; };
  changes.erase(std::remove_if(changes.begin(), changes.end(), unchanged), changes.end());
}

void EmbeddingStore::restore_counts(const std::vector<CountChange>& changes) {
  const auto restore = [&](const CountChange& change) {
    const Table& table = *tables_[change.table];
    tables_[change.table]->counts.restore(table.index.hash(change.key), change.key, change.before);
  };
  for (auto change = changes.rbegin(); change != changes.rend(); ++change) {
    if (change->table < 0) continue;
    if (tables_[change->table]->counts.filtering() || change->before == 0) restore(*change);
  }
  for (const CountChange& change : changes) {
    if (change.table < 0 || change.before == 0) continue;
    if (!tables_[change.table]->counts.filtering()) restore(change);
  }
}

void EmbeddingStore::take_numbers(const Missing& missing) {
  num_rows_.store(missing.num_rows, std::memory_order_relaxed);
  num_free_ = missing.num_free;
  for (std::size_t t = 0; t < tables_.size(); ++t) tables_[t]->size = missing.sizes[t];
}

// Rows, records and embeddings of inserted keys; handles, status and counters of all missing ones.
void EmbeddingStore::write_new_rows(const Missing& missing, std::int64_t batch,
                                    const RetrievalSpan& out) {
  const std::int64_t size = missing.in.size;
  const auto status_of = [&](std::uint32_t i) {
    const std::uint32_t first = missing.first[i];
    if (missing.rows[first] == kNoRow) {
      return missing.admitted[first] != 0 ? KeyStatus::kRefused : KeyStatus::kNotAdmitted;
    }
    return first == i ? KeyStatus::kInserted : KeyStatus::kFound;
  };
  // Rows that were used before lie anywhere.
  const auto request_row = [&](std::uint32_t i) {
    const std::uint32_t number = missing.rows[i];
    if (number == kNoRow) return;
    __builtin_prefetch(record(number), 1);
    __builtin_prefetch(age(number), 1);
    const std::int64_t last = std::min<std::int64_t>(row_floats_, 8 * kFloatsPerLine);
    for (std::int64_t d = 0; d < last; d += kFloatsPerLine) {
      __builtin_prefetch(row(number) + d, 1);
    }
  };
  const EmbeddingWriter copy_out = writer(out.embeddings, size);
  std::vector<std::atomic<std::int64_t>> counted(tables_.size() * kNumStatus);
  const auto write = [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::int64_t> sums(counted.size(), 0);
    for (auto i = static_cast<std::uint32_t>(begin); i < static_cast<std::uint32_t>(end); ++i) {
      if (i + kRowsAhead < end) request_row(i + kRowsAhead);
      const std::uint32_t number = missing.rows[missing.first[i]];
      const std::int64_t j = missing.positions[i];
      out.handles[j] = number == kNoRow ? -1 : std::int64_t{number};
      const KeyStatus status = status_of(i);
      out.status[j] = static_cast<std::uint8_t>(status);
      if (missing.first[i] == i) {
        ++sums[static_cast<std::size_t>(missing.table(i)) * kNumStatus + out.status[j]];
      }
      if (status != KeyStatus::kInserted) continue;
      const std::int64_t before = missing.before.empty() ? 0 : missing.before[i];
      initial_row(missing.table(i), missing.key(i), row(number));
      if (out.embeddings != nullptr) copy_out.to(row(number), j);
      *record(number) = Record{missing.key(i), std::max<std::int64_t>(batch, -1),
                               sum_of(before, missing.occurrences[i]), missing.table(i), 0};
      *age(number) = age_of(batch);
    }
    copy_out.finish();
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

void EmbeddingStore::undo(const RetrievalSpan& retrieval, std::int64_t size,
                          RetrievalJournal* journal) {
  check_handles(retrieval.handles, size);
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  if (journal->sequence < 0) {
    throw std::invalid_argument("undo: this retrieval has been undone already");
  }
  if (journal->sequence != newest_) {
    throw std::invalid_argument(
        "undo: this is not the newest retrieval of the store: undo newer ones first");
  }
  if (journal->num_evicted > 0 && (limbo_.empty() || limbo_.back().sequence != journal->sequence)) {
    throw std::invalid_argument(
        "undo: rows that this retrieval evicted are free since the retrieval of a batch two or "
        "more after it");
  }
  restore_metadata(retrieval, size, *journal);
  // Backwards, so that repeating the retrieval gives the keys the same rows.
  for (std::int64_t j = size - 1; j >= 0; --j) {
    if (retrieval.status[j] != static_cast<std::uint8_t>(KeyStatus::kInserted)) continue;
    const Record* const inserted = record(retrieval.handles[j]);
    if (*age(retrieval.handles[j]) == kNoAge) continue;
    Table* const table = tables_[inserted->table].get();
    const std::int64_t key = inserted->key;
    free_row(table, table->index.erase(table->index.hash(key), key));
  }
  if (journal->num_evicted > 0) {
    bring_back(limbo_.back());
    limbo_.pop_back();
  }
  restore_counts(journal->counts);
  for (std::size_t t = 0; t < tables_.size(); ++t) tables_[t]->counters = journal->counters[t];
  last_batch_ = journal->last_batch_before;
  newest_ = journal->newest_before;
  journal->sequence = -1;
}

std::int64_t EmbeddingStore::load_rows(const KeySpan& in, const float* rows,
                                       const MetadataSpan& metadata) {
  check_tables(in);
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  std::vector<std::int64_t> handles(static_cast<std::size_t>(in.size));
  search(in, handles.data());
  Missing missing(in);
  collect_missing(handles.data(), &missing);
  std::int64_t refused = -1;
  try {
    enter_provisionally(&missing);
    missing.admitted = Scratch<std::uint8_t>(missing.count());
    std::fill_n(missing.admitted.get(), missing.count(), std::uint8_t{1});
    number_rows(&missing, Departure{});
  } catch (...) {
    withdraw(missing);
    throw;
  }
  for (std::uint32_t i = 0; i < missing.count(); ++i) {
    const std::uint32_t number = missing.rows[missing.first[i]];
    handles[missing.positions[i]] = number;
    if (number == kNoRow && refused < 0) refused = missing.positions[i];
  }
  if (refused >= 0) {
    withdraw(missing);
    return refused;
  }
  take_numbers(missing);
  settle(missing);
  newest_ = ++sequence_;
  for (std::int64_t j = 0; j < in.size; ++j) {
    *record(handles[j]) =
        Record{in.keys[j], metadata.last_used[j], metadata.frequency[j], in.tables[j], 0};
    *age(handles[j]) = age_of(metadata.last_used[j]);
    last_batch_ = std::max(last_batch_, metadata.last_used[j]);
  }
  write_back(handles.data(), in.size, rows);
  return -1;
}

}  // namespace nestpipe
