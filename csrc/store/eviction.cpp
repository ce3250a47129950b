// Eviction: which rows go, and their ways into limbo, back, and to the free rows.
#include "nestpipe/eviction.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "by_shard.h"
#include "departure.h"
#include "nestpipe/parallel.h"
#include "nestpipe/store.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kRowsPerChunk = std::int64_t{1} << 14;
constexpr std::int64_t kSamples = 8192;
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
  const auto end = candidates->begin() + std::max<std::int64_t>(wanted, 0);
  std::nth_element(candidates->begin(), end, candidates->end());
  candidates->erase(end, candidates->end());
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
  if (batch < 0) return departure;
  departure.expired.assign(tables_.size(), 0);
  departure.evicted.assign(tables_.size(), 0);
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    if (tables_[t]->config.eviction.kind == EvictionKind::kNone) continue;
    choose_victims(static_cast<std::int32_t>(t), num_new[t], batch, score, &departure);
  }
  const std::vector<EvictionCandidate>& rows = departure.rows;
  departure.by_shard.assign(static_cast<std::uint32_t>(rows.size()),
                            [&](std::uint32_t i) { return rows[i].hash; });
  departure.numbers.reserve(rows.size());
  for (const EvictionCandidate& leaving : rows) {
    departure.numbers.push_back(leaving.row);
  }
  return departure;
}

void EmbeddingStore::choose_victims(std::int32_t table, std::int64_t num_new, std::int64_t batch,
                                    const ScoreFunction& score, Departure* departure) const {
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
  departure->rows.insert(departure->rows.end(), rows.begin(), rows.end());
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
                      static_cast<std::uint32_t>(number), table});
  };
  const bool through_index = tables_[table]->size < num_rows / kSmallShare;
  const std::int64_t num_chunks =
      through_index ? kNumShards : (num_rows + kRowsPerChunk - 1) / kRowsPerChunk;
  std::vector<std::vector<EvictionCandidate>> chunks(static_cast<std::size_t>(num_chunks));
  parallel_tasks(num_chunks, [&](std::int64_t chunk) {
    std::vector<EvictionCandidate>* const found = &chunks[static_cast<std::size_t>(chunk)];
    if (through_index) {
      index.for_each_in_shard(static_cast<int>(chunk), [&](std::int64_t key, std::uint32_t number) {
        // Missing keys stand in the index with provisional numbers.
        if (number < num_rows && record(number)->key == key) consider(number, found);
      });
      return;
    }
    const std::int64_t end = std::min(num_rows, (chunk + 1) * kRowsPerChunk);
    for (std::int64_t number = chunk * kRowsPerChunk; number < end; ++number) {
      consider(number, found);
    }
  });
  std::vector<EvictionCandidate> all;
  std::size_t total = 0;
  for (const auto& chunk : chunks) total += chunk.size();
  all.reserve(total);
  for (const auto& chunk : chunks) all.insert(all.end(), chunk.begin(), chunk.end());
  return all;
}

// A first rank that most likely at least `wanted` rows do not exceed, from a sample: it decides how
// many rows are looked at closely, never which ones go.
std::int64_t EmbeddingStore::estimate_limit(std::int32_t table, std::int64_t unused_since,
                                            bool by_frequency, std::int64_t wanted) const {
  const std::int64_t num_rows = num_rows_.load(std::memory_order_relaxed);
  const std::int64_t stride = num_rows / kSamples;
  if (stride < 2 || tables_[table]->size < num_rows / kSmallShare) return kNoLimit;
  std::vector<std::int64_t> sample;
  for (std::int64_t number = 0; number < num_rows; number += stride) {
    const Record& seen = *record(number);
    if (seen.table != table || seen.last_used >= unused_since) continue;
    sample.push_back(by_frequency ? seen.frequency : seen.last_used);
  }
  const std::int64_t place = wanted / stride + wanted / (4 * stride) + 64;
  if (place >= static_cast<std::int64_t>(sample.size())) return kNoLimit;
  std::nth_element(sample.begin(), sample.begin() + place, sample.end());
  return sample[static_cast<std::size_t>(place)];
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

// Takes rows out of the index; `limbo_` has room for one more. Sizes are the caller's business.
void EmbeddingStore::depart(Departure* departure, std::int64_t batch, std::int64_t sequence) {
  if (departure->rows.empty()) return;
  const std::vector<EvictionCandidate>& rows = departure->rows;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    tables_[t]->counters.expired += departure->expired[t];
    tables_[t]->counters.evicted += departure->evicted[t];
  }
  departure->by_shard.for_each(
      [&](std::uint32_t i) { __builtin_prefetch(record(rows[i].row), 1); },
      [&](std::uint32_t i) { tables_[rows[i].table]->index.prefetch(rows[i].hash); },
      [&](std::uint32_t i) {
        Record* const leaving = record(rows[i].row);
        tables_[rows[i].table]->index.erase(rows[i].hash, leaving->key);
        leaving->table = in_limbo(leaving->table);
      });
  limbo_.push_back(Limbo{batch, sequence, std::move(departure->numbers)});
}

void EmbeddingStore::bring_back(const Limbo& limbo) {
  for (const std::uint32_t number : limbo.rows) {
    Record* const back = record(number);
    back->table = in_limbo(back->table);
    Table* const table = tables_[back->table].get();
    // The index held the key before, and never shrinks: no allocation.
    table->index.insert(table->index.hash(back->key), back->key, number);
    ++table->size;
  }
}

void EmbeddingStore::free_limbo(std::int64_t last_batch) {
  const auto settled = [&](const Limbo& limbo) {
    if (limbo.batch > last_batch) return false;
    for (const std::uint32_t number : limbo.rows) *free_row_number(num_free_++) = number;
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
      gone.tables.push_back(in_limbo(record(number)->table));
    }
    return gone;
  }
  throw std::invalid_argument(
      "evicted: rows that this retrieval evicted are free, their keys forgotten; ask before the "
      "retrieval of a batch two or more after it");
}

}  // namespace nestpipe
