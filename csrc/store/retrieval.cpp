// Retrieval: found keys are used, absent ones get rows as admission, eviction and quotas allow;
// undo.
//
// Absent keys take these steps, none of which depends on the number of threads:
//   1. grouped by shard, each key enters its index with its position among the missing as
//      provisional row number; a key that is there already is a repetition of an earlier one. In
//      stores without rules and quotas it enters with the row number that it gets if no key is
//      repeated, and where none is, this is all: only step 7 follows;
//   2. admission decides from the counts; one thread adds up how many rows each table needs;
//   3. the rows that go are chosen (eviction.cpp);
//   4. one thread numbers the rows in input order, within the quotas, and makes room for them;
//   5. keys that stay without a row are counted;
//   6. grouped by shard, provisional numbers become row numbers, keys without a row leave the
//      index, and rows that go leave it, too;
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

// Of numbers that are not negative, at most the largest there is: occurrences never wrap around.
std::int64_t sum_of(std::int64_t a, std::int64_t b) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  return a > kLargest - b ? kLargest : a + b;
}

}  // namespace

void EmbeddingStore::retrieve(const KeySpan& in, const std::int64_t* counts, std::int64_t batch,
                              const ScoreFunction& score, const RetrievalSpan& answer,
                              RetrievalJournal* wanted) {
  check_tables(in);
  const Scratch<std::int64_t> handles(answer.handles == nullptr ? in.size : 0);
  const RetrievalSpan out = {answer.handles == nullptr ? handles.get() : answer.handles,
                             answer.status, answer.embeddings};
  const std::unique_lock<std::shared_mutex> lock = own_keys();
  if (batch >= 0) free_limbo(batch - 2);
  // Where nobody will undo it and no rule looks at metadata, these change once nothing can fail.
  const bool late = wanted == nullptr && (batch < 0 || !evicts_);
  RetrievalJournal own;
  RetrievalJournal* const journal = wanted == nullptr ? &own : wanted;
  if (!late) start_journal(in.size, journal);
  search(in, out.handles);
  Missing missing(in, counts);
  parallel_ranges(in.size, kKeysPerTask, [&](std::int64_t begin, std::int64_t end) {
    std::memset(out.status + begin, static_cast<int>(KeyStatus::kFound),
                static_cast<std::size_t>(end - begin));
  });
  collect_missing(out.handles, &missing);
  if (!late) use_found(out, in.size, counts, batch, journal);
  Departure departure;
  try {
    missing.numbered = all_get_rows();
    enter(&missing);
    if (!numbered_on_entry(&missing)) {
      admit(&missing);
      departure = plan_departure(missing.num_new, batch, score);
      number_rows(&missing, departure);
      if (wanted == nullptr) check_numbers(missing);
      limbo_.reserve(limbo_.size() + 1);
      count_absent(missing, journal);
    }
  } catch (...) {
    restore_counts(journal->counts);
    withdraw(missing);
    if (!late) restore_metadata(out, in.size, *journal);
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
  if (late) use_found(out, in.size, counts, batch, nullptr);
  write_new_rows(missing, batch, out);
  if (out.embeddings == nullptr) return;
  if (file_ == nullptr) {
    copy_others(missing, out);
  } else if (missing.count() != in.size || !missing.all_have_rows) {
    copy_embeddings(out.handles, in, out.status, out.embeddings);
  }
}

void EmbeddingStore::start_journal(std::int64_t size, RetrievalJournal* journal) const {
  journal->last_used = Scratch<std::int64_t>(size);
  journal->frequency = Scratch<std::int64_t>(size);
  journal->counts.clear();
  journal->counters.clear();
  for (const auto& table : tables_) journal->counters.push_back(table->counters);
  parallel_ranges(size, kKeysPerTask, [&](std::int64_t begin, std::int64_t end) {
    std::fill(journal->last_used.get() + begin, journal->last_used.get() + end, -1);
    std::fill(journal->frequency.get() + begin, journal->frequency.get() + end, 0);
  });
}

void EmbeddingStore::admit(Missing* missing) {
  const std::uint32_t count = missing->count();
  missing->occurrences = Scratch<std::int64_t>(count);
  missing->admitted = Scratch<std::uint8_t>(count);
  std::vector<std::atomic<std::int64_t>> num_new(tables_.size());
  parallel_ranges(count, kKeysPerTask, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::int64_t> firsts(tables_.size(), 0);
    for (auto i = static_cast<std::uint32_t>(begin); i < static_cast<std::uint32_t>(end); ++i) {
      missing->occurrences[i] = missing->own_count(i);
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
  free_rows_.take(missing.num_reused);
  for (std::size_t t = 0; t < tables_.size(); ++t) tables_[t]->size = missing.sizes[t];
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
  // Repeating the retrieval gives the keys the same rows, as long as no others become free.
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
  Missing missing(in, nullptr);
  collect_missing(handles.data(), &missing);
  std::int64_t refused = -1;
  try {
    enter(&missing);
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
        Record{in.keys[j], metadata.last_used[j], metadata.frequency[j], in.tables[j]};
    *age(handles[j]) = age_of(metadata.last_used[j]);
    last_batch_ = std::max(last_batch_, metadata.last_used[j]);
  }
  write_back(handles.data(), in.size, rows);
  return -1;
}

}  // namespace nestpipe
