// Eviction: which rows go, and their ways into limbo, back, and to the free rows.
#include "nestpipe/eviction.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "departure.h"
#include "nestpipe/parallel.h"
#include "nestpipe/request_line.h"
#include "nestpipe/store.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kRowsPerChunk = std::int64_t{1} << 14;
constexpr std::int64_t kSamples = 4096;
constexpr std::int64_t kRowsPerTask = 2048;
constexpr std::int64_t kAhead = 16;
constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();
// A table with less than this share of the store's rows is walked through its index.
constexpr std::int64_t kSmallShare = 4;

// Sets a thread's id while it is inside a score function.
class Scoring {
 public:
  explicit Scoring(std::atomic<std::thread::id>* thread) : thread_(thread) {
    thread_->store(std::this_thread::get_id());
  }
  ~Scoring() { thread_->store(std::thread::id()); }

 private:
  std::atomic<std::thread::id>* thread_;
};

}  // namespace

void keep_lowest(std::vector<EvictionCandidate>* candidates, std::int64_t wanted) {
  if (wanted >= static_cast<std::int64_t>(candidates->size())) return;
  if (wanted <= 0) return candidates->clear();
  std::vector<std::int64_t> firsts;
  firsts.reserve(candidates->size());
  for (const EvictionCandidate& candidate : *candidates) firsts.push_back(candidate.first);
  std::nth_element(firsts.begin(), firsts.begin() + (wanted - 1), firsts.end());
  const std::int64_t boundary = firsts[static_cast<std::size_t>(wanted - 1)];
  std::vector<EvictionCandidate> ties;
  std::int64_t below = 0;
  for (const EvictionCandidate& candidate : *candidates) {
    below += candidate.first < boundary;
    if (candidate.first == boundary) ties.push_back(candidate);
  }
  const auto highest = ties.begin() + (wanted - below - 1);
  std::nth_element(ties.begin(), highest, ties.end());
  const EvictionCandidate last = *highest;
  const auto stays = [&last](const EvictionCandidate& candidate) { return last < candidate; };
  candidates->erase(std::remove_if(candidates->begin(), candidates->end(), stays),
                    candidates->end());
}

std::int64_t ordered_bits(double score) {
  score += 0.0;  // -0 becomes +0.
  std::int64_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  return bits >= 0 ? bits : bits ^ std::numeric_limits<std::int64_t>::max();
}

EmbeddingStore::Departure EmbeddingStore::plan_departure(const std::vector<std::int64_t>& num_new,
                                                         std::int64_t batch,
                                                         const ScoreFunction& score) const {
  Departure departure;
  if (batch < 0 || !evicts_) return departure;
  departure.expired.assign(tables_.size(), 0);
  departure.evicted.assign(tables_.size(), 0);
  std::vector<std::vector<EvictionCandidate>> rows(tables_.size());
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    if (tables_[t]->config.eviction.kind == EvictionKind::kNone) continue;
    rows[t] = choose_victims(static_cast<std::int32_t>(t), num_new[t], batch, score, &departure);
  }
  // By shard, tables one after another within it.
  std::vector<std::int64_t>& ends = departure.shard_ends;
  ends.assign(kNumShards + 1, 0);
  for (const auto& chosen : rows) {
    for (const EvictionCandidate& leaving : chosen) ++ends[shard_of(leaving.hash) + 1];
  }
  for (int s = 0; s < kNumShards; ++s) ends[s + 1] += ends[s];
  std::vector<std::int64_t> next(ends.begin(), ends.end() - 1);
  departure.leaving.resize(static_cast<std::size_t>(ends[kNumShards]));
  departure.numbers.reserve(departure.leaving.size());
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    for (const EvictionCandidate& leaving : rows[t]) {
      const auto at = static_cast<std::size_t>(next[shard_of(leaving.hash)]++);
      departure.leaving[at] = {leaving.hash, leaving.row, static_cast<std::int32_t>(t)};
      departure.numbers.push_back(leaving.row);
    }
  }
  return departure;
}

std::vector<EvictionCandidate> EmbeddingStore::choose_victims(std::int32_t table,
                                                              std::int64_t num_new,
                                                              std::int64_t batch,
                                                              const ScoreFunction& score,
                                                              Departure* departure) const {
  const Table& chosen = *tables_[table];
  const EvictionRule& rule = chosen.config.eviction;
  std::vector<EvictionCandidate> rows;
  if (rule.kind == EvictionKind::kTtl && batch % rule.interval == 0) {
    rows = candidates(table, batch - rule.steps, false, kNoLimit);
  }
  const auto num_expired = static_cast<std::int64_t>(rows.size());
  const std::int64_t quota = chosen.config.quota;
  if (quota >= 0 && chosen.size - num_expired + num_new > quota) {
    // Expired rows are those used longest ago, so they are among the lowest.
    const std::int64_t wanted = chosen.size + num_new - rule.keep;
    const bool by_frequency = rule.kind == EvictionKind::kLfu;
    if (rule.kind == EvictionKind::kScore) {
      rows = candidates(table, batch - 1, false, kNoLimit);
      score_candidates(table, batch, score, &rows);
    } else {
      const std::int64_t limit = estimate_limit(table, batch - 1, by_frequency, wanted);
      rows = candidates(table, batch - 1, by_frequency, limit);
      if (limit != kNoLimit && static_cast<std::int64_t>(rows.size()) < wanted) {
        rows = candidates(table, batch - 1, by_frequency, kNoLimit);
      }
    }
    keep_lowest(&rows, wanted);
  }
  departure->expired[table] = num_expired;
  departure->evicted[table] = static_cast<std::int64_t>(rows.size()) - num_expired;
  return rows;
}

// Rows of a table that went unused since before batch `unused_since` and whose first rank is at
// most `limit`. Rows that this retrieval found count as used by it.
std::vector<EvictionCandidate> EmbeddingStore::candidates(std::int32_t table,
                                                          std::int64_t unused_since,
                                                          bool by_frequency,
                                                          std::int64_t limit) const {
  const KeyIndex& index = tables_[table]->index;
  const std::int64_t num_rows = num_rows_.load(std::memory_order_relaxed);
  const auto consider = [&](std::int64_t number, std::vector<EvictionCandidate>* found) {
    const Record& seen = *record(number);
    if (seen.table != table || seen.last_used >= unused_since) return;
    const std::int64_t first = by_frequency ? seen.frequency : seen.last_used;
    if (first > limit) return;
    found->push_back({first, by_frequency ? seen.last_used : seen.frequency, index.hash(seen.key),
                      static_cast<std::uint32_t>(number)});
  };
  const bool through_index = tables_[table]->size < num_rows / kSmallShare;
  const std::int64_t num_chunks =
      through_index ? kNumShards : (num_rows + kRowsPerChunk - 1) / kRowsPerChunk;
  std::vector<std::vector<EvictionCandidate>> chunks(static_cast<std::size_t>(num_chunks));
  const std::int64_t last_unused = unused_since - 1;
  const Age oldest = age_of(by_frequency ? last_unused : std::min(last_unused, limit));
  parallel_tasks(num_chunks, [&](std::int64_t chunk) {
    std::vector<EvictionCandidate>* const found = &chunks[static_cast<std::size_t>(chunk)];
    if (through_index) {
      index.for_each_in_shard(static_cast<int>(chunk), [&](std::int64_t key, std::uint32_t number) {
        // Missing keys stand in the index with provisional numbers.
        if (number >= num_rows || *age(number) > oldest || record(number)->key != key) return;
        consider(number, found);
      });
      return;
    }
    std::vector<std::uint32_t> old;
    old_rows(chunk * kRowsPerChunk, std::min(num_rows, (chunk + 1) * kRowsPerChunk), oldest, &old);
    found->reserve(old.size());
    for (std::size_t i = 0; i < old.size(); ++i) {
      if (i + kAhead < old.size()) request_line(record(old[i + kAhead]));
      consider(old[i], found);
    }
  });
  if (chunks.size() == 1) return std::move(chunks[0]);
  std::vector<EvictionCandidate> all;
  std::size_t total = 0;
  for (const auto& chunk : chunks) total += chunk.size();
  all.reserve(total);
  for (const auto& chunk : chunks) all.insert(all.end(), chunk.begin(), chunk.end());
  return all;
}

// Rows of [begin, end), of any table, that have a key and whose age is at most `oldest`.
void EmbeddingStore::old_rows(std::int64_t begin, std::int64_t end, Age oldest,
                              std::vector<std::uint32_t>* rows) const {
  rows->resize(static_cast<std::size_t>(end - begin));
  std::uint32_t* next = rows->data();
  for (std::int64_t from = begin; from < end;) {
    const std::int64_t run = std::min<std::int64_t>(
        end - from, static_cast<std::int64_t>(ages_.run(static_cast<std::uint64_t>(from))));
    const Age* const ages = age(from);
    for (std::int64_t i = 0; i < run; ++i) {
      // Written always, kept where it counts: no branch to mispredict.
      *next = static_cast<std::uint32_t>(from + i);
      next += ages[i] <= oldest;
    }
    from += run;
  }
  rows->resize(static_cast<std::size_t>(next - rows->data()));
}

// A first rank that most likely at least `wanted` rows do not exceed, from a sample: it decides how
// many rows are looked at closely, never which ones go.
std::int64_t EmbeddingStore::estimate_limit(std::int32_t table, std::int64_t unused_since,
                                            bool by_frequency, std::int64_t wanted) const {
  const std::int64_t num_rows = num_rows_.load(std::memory_order_relaxed);
  const std::int64_t stride = num_rows / kSamples;
  if (stride < 2 || tables_[table]->size < num_rows / kSmallShare) return kNoLimit;
  const Age oldest = age_of(unused_since - 1);
  std::vector<std::int64_t> sample;
  sample.reserve(static_cast<std::size_t>(num_rows / stride + 1));
  for (std::int64_t number = 0; number < num_rows; number += stride) {
    const Age seen = *age(number);
    if (seen > oldest) continue;
    if (tables_.size() > 1 && record(number)->table != table) continue;
    sample.push_back(by_frequency ? record(number)->frequency : std::int64_t{seen} - 1);
  }
  const auto expected = static_cast<double>(wanted) / static_cast<double>(stride);
  const auto place = static_cast<std::int64_t>(expected + 3.0 * std::sqrt(expected)) + 8;
  if (place >= static_cast<std::int64_t>(sample.size())) return kNoLimit;
  std::nth_element(sample.begin(), sample.begin() + place, sample.end());
  const std::int64_t limit = sample[static_cast<std::size_t>(place)];
  // Ages stop at their largest value, which says nothing about batches beyond.
  return !by_frequency && limit + 1 >= std::int64_t{kNoAge} - 1 ? kNoLimit : limit;
}

// Ranks of rows by the user's function, which sees them in the order of their hashes.
void EmbeddingStore::score_candidates(std::int32_t table, std::int64_t batch,
                                      const ScoreFunction& score,
                                      std::vector<EvictionCandidate>* rows) const {
  if (rows->empty()) return;
  if (!score) throw std::invalid_argument("store: a table that evicts by score needs its function");
  std::sort(rows->begin(), rows->end(),
            [](const EvictionCandidate& a, const EvictionCandidate& b) { return a.hash < b.hash; });
  ScoreArguments arguments{table, batch, {}, {}, {}};
  for (const EvictionCandidate& candidate : *rows) {
    arguments.keys.push_back(record(candidate.row)->key);
    arguments.last_used.push_back(candidate.first);
    arguments.frequency.push_back(candidate.second);
  }
  std::vector<double> scores(rows->size());
  {
    const Scoring scoring(&scoring_thread_);
    score(arguments, scores.data());
  }
  for (std::size_t i = 0; i < rows->size(); ++i) {
    (*rows)[i].first = ordered_bits(scores[i]);
    (*rows)[i].second = 0;
  }
}

// Takes rows out of the index, which no longer holds provisional numbers; `limbo_` has room for one
// more. Sizes are the caller's business.
void EmbeddingStore::depart(Departure* departure, std::int64_t batch, std::int64_t sequence) {
  const auto count = static_cast<std::int64_t>(departure->leaving.size());
  if (count == 0) return;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    tables_[t]->counters.expired += departure->expired[t];
    tables_[t]->counters.evicted += departure->evicted[t];
  }
  const Departure::Row* const rows = departure->leaving.data();
  const std::vector<std::int64_t>& ends = departure->shard_ends;
  const std::int64_t shards_per_task = kNumShards * kRowsPerTask / count + 1;
  parallel_ranges(kNumShards, shards_per_task, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = ends[begin]; i < ends[end]; ++i) {
      if (i + kAhead < ends[end]) {
        tables_[rows[i + kAhead].table]->index.prefetch(rows[i + kAhead].hash);
      }
      tables_[rows[i].table]->index.erase_row(rows[i].hash, rows[i].number);
      *age(rows[i].number) = kNoAge;
    }
  });
  limbo_.push_back(Limbo{batch, sequence, std::move(departure->numbers)});
}

void EmbeddingStore::bring_back(const Limbo& limbo) {
  for (const std::uint32_t number : limbo.rows) {
    const Record& back = *record(number);
    Table* const table = tables_[back.table].get();
    // The index held the key before, and never shrinks: no allocation.
    table->index.insert(table->index.hash(back.key), back.key, number);
    *age(number) = age_of(back.last_used);
    ++table->size;
  }
}

void EmbeddingStore::free_limbo(std::int64_t last_batch) {
  const auto settled = [&](const Limbo& limbo) {
    if (limbo.batch > last_batch) return false;
    for (const std::uint32_t number : limbo.rows) free_rows_.add(number);
    return true;
  };
  limbo_.erase(std::remove_if(limbo_.begin(), limbo_.end(), settled), limbo_.end());
}

EvictedKeys EmbeddingStore::evicted(const RetrievalJournal& journal) const {
  const std::shared_lock<std::shared_mutex> lock = shared_keys();
  EvictedKeys gone;
  if (journal.num_evicted == 0 || journal.sequence < 0) return gone;
  for (const Limbo& limbo : limbo_) {
    if (limbo.sequence != journal.sequence) continue;
    for (const std::uint32_t number : limbo.rows) {
      gone.keys.push_back(record(number)->key);
      gone.tables.push_back(record(number)->table);
    }
    return gone;
  }
  throw std::invalid_argument(
      "evicted: rows that this retrieval evicted are free, their keys forgotten; ask before the "
      "retrieval of a batch two or more after it");
}

}  // namespace nestpipe
