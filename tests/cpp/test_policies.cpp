// Admission, eviction and undo against a dictionary: random calls on any number of threads, and
// failing memory at any point.
#include <algorithm>
#include <cstring>
#include <map>
#include <new>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "nestpipe/parallel.h"
#include "nestpipe/store.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kCapacity = 200;

// A table that admits at 3 occurrences and evicts the rows unused for longest.
TableConfig table_of(const char* name, std::int64_t filter_cells, EvictionKind eviction) {
  TableConfig table;
  table.hash = hash_name(name);
  table.init = {InitKind::kUniform, {-1.0, 1.0}};
  table.quota = kCapacity;
  table.admission.kind = AdmissionKind::kMinFrequency;
  table.admission.count = 3;
  table.admission.filter_cells = filter_cells;
  table.eviction.kind = eviction;
  table.eviction.keep = kCapacity - 20;
  table.eviction.steps = 1;
  return table;
}

StoreConfig config_of(std::uint64_t limit_bytes = ~std::uint64_t{0}) {
  StoreConfig config;
  config.dim = 3;
  config.state_floats = 2;
  config.limit_bytes = limit_bytes;
  config.tables = {table_of("exact", 0, EvictionKind::kLru),
                   table_of("filtered", 4096, EvictionKind::kTtl),
                   table_of("scored", 0, EvictionKind::kScore)};
  return config;
}

// Rows with small keys go first; ties by hash.
void score_by_key(const ScoreArguments& rows, double* scores) {
  for (std::size_t i = 0; i < rows.keys.size(); ++i) {
    scores[i] = static_cast<double>(rows.keys[i] / 4);
  }
}

struct Call {
  explicit Call(std::int64_t size)
      : keys(size), tables(size), counts(size), handles(size), status(size) {}

  KeySpan in() const {
    return {keys.data(), tables.data(), static_cast<std::int64_t>(keys.size())};
  }
  RetrievalSpan out() { return {handles.data(), status.data()}; }
  void retrieve(EmbeddingStore* store, std::int64_t batch) {
    store->retrieve(in(), counts.data(), batch, score_by_key, out(), &journal);
  }
  void undo(EmbeddingStore* store) {
    store->undo(out(), static_cast<std::int64_t>(keys.size()), &journal);
  }

  std::vector<std::int64_t> keys;
  std::vector<std::int32_t> tables;
  std::vector<std::int64_t> counts;
  std::vector<std::int64_t> handles;
  std::vector<std::uint8_t> status;
  RetrievalJournal journal;
};

Call random_call(std::mt19937_64* random, std::int64_t size, std::uint64_t key_range) {
  Call call(size);
  for (std::int64_t j = 0; j < size; ++j) {
    call.keys[j] = static_cast<std::int64_t>((*random)() % key_range);
    call.tables[j] = static_cast<std::int32_t>((*random)() % 3);
    call.counts[j] = static_cast<std::int64_t>((*random)() % 3) + 1;
  }
  return call;
}

// key -> (handle, last_used, frequency, embedding), counts and counters of all tables.
using Row = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::vector<float>>;
struct Contents {
  std::vector<std::map<std::int64_t, Row>> rows;
  std::vector<std::map<std::int64_t, std::int64_t>> counts;
  std::vector<std::vector<std::uint8_t>> cells;
  std::vector<std::int64_t> counters;

  bool operator==(const Contents& other) const {
    return rows == other.rows && counts == other.counts && cells == other.cells &&
           counters == other.counters;
  }
};

Contents contents_of(const EmbeddingStore& store) {
  Contents all;
  for (std::int32_t t = 0; t < store.num_tables(); ++t) {
    std::vector<std::int64_t> keys;
    std::vector<std::int64_t> handles;
    store.export_table(t, &keys, &handles);
    const auto size = static_cast<std::int64_t>(keys.size());
    CHECK_EQUAL(size, store.size(t));
    const std::vector<std::int32_t> tables(keys.size(), t);
    std::vector<std::int64_t> found(keys.size());
    store.find({keys.data(), tables.data(), size}, found.data());
    CHECK_EQUAL(found == handles, true);
    std::vector<std::int64_t> last_used(keys.size());
    std::vector<std::int64_t> frequency(keys.size());
    store.read_metadata(handles.data(), size, {last_used.data(), frequency.data()});
    std::vector<float> embeddings(keys.size() * store.dim());
    store.read_embeddings(handles.data(), {keys.data(), tables.data(), size}, embeddings.data());
    std::map<std::int64_t, Row> rows;
    for (std::int64_t j = 0; j < size; ++j) {
      const auto from = embeddings.begin() + j * store.dim();
      rows[keys[j]] = {handles[j], last_used[j], frequency[j], {from, from + store.dim()}};
    }
    all.rows.push_back(std::move(rows));
    const CountsState state = store.admission_state(t, 0, kNumShards);
    std::map<std::int64_t, std::int64_t> counts;
    for (std::size_t i = 0; i < state.keys.size(); ++i) {
      counts[state.keys[i]] = state.counts.empty() ? 0 : state.counts[i];
    }
    all.counts.push_back(std::move(counts));
    all.cells.push_back(state.cells);
    const TableCounters counters = store.counters(t);
    for (const std::int64_t counter : {counters.inserted, counters.evicted, counters.expired,
                                       counters.refused, counters.not_admitted}) {
      all.counters.push_back(counter);
    }
  }
  return all;
}

// Table 0 alone: exact counts, rows unused for longest go first.
class Dictionary {
 public:
  std::uint8_t use(const Call& call, std::int64_t j, std::int64_t batch) {
    const auto seen = rows_.find(call.keys[j]);
    if (seen == rows_.end()) return static_cast<std::uint8_t>(KeyStatus::kAbsent);
    seen->second.first = batch;
    seen->second.second += call.counts[j];
    return static_cast<std::uint8_t>(KeyStatus::kFound);
  }

  // Statuses of the call's keys in table 0.
  std::vector<std::uint8_t> retrieve(const Call& call, std::int64_t batch) {
    std::vector<std::uint8_t> status(call.keys.size(), 255);
    std::vector<std::int64_t> absent;  // Distinct, in order.
    std::map<std::int64_t, std::int64_t> total;
    for (std::size_t j = 0; j < call.keys.size(); ++j) {
      if (call.tables[j] != 0) continue;
      status[j] = use(call, static_cast<std::int64_t>(j), batch);
      if (status[j] == static_cast<std::uint8_t>(KeyStatus::kFound)) continue;
      if (total.count(call.keys[j]) == 0) {
        absent.push_back(call.keys[j]);
        total[call.keys[j]] = ghosts_.count(call.keys[j]) != 0 ? ghosts_[call.keys[j]] : 0;
      }
      total[call.keys[j]] += call.counts[j];
    }
    const auto num_new = std::count_if(absent.begin(), absent.end(),
                                       [&](std::int64_t key) { return total[key] >= 3; });
    make_room(num_new, batch);
    std::map<std::int64_t, KeyStatus> became;
    for (const std::int64_t key : absent) {
      if (total[key] >= 3 && static_cast<std::int64_t>(rows_.size()) < kCapacity) {
        rows_[key] = {batch, total[key]};
        ghosts_.erase(key);
        became[key] = KeyStatus::kInserted;
      } else {
        ghosts_[key] = total[key];
        became[key] = total[key] >= 3 ? KeyStatus::kRefused : KeyStatus::kNotAdmitted;
      }
    }
    for (std::size_t j = 0; j < call.keys.size(); ++j) {
      if (status[j] != static_cast<std::uint8_t>(KeyStatus::kAbsent)) continue;
      KeyStatus& key_status = became[call.keys[j]];
      status[j] = static_cast<std::uint8_t>(key_status);
      if (key_status == KeyStatus::kInserted) key_status = KeyStatus::kFound;
    }
    return status;
  }

  void check(const Contents& contents) const {
    std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> seen;
    for (const auto& [key, row] : contents.rows[0]) {
      seen[key] = {std::get<1>(row), std::get<2>(row)};
    }
    CHECK_EQUAL(seen == rows_, true);
    CHECK_EQUAL(contents.counts[0] == ghosts_, true);
  }

 private:
  void make_room(std::int64_t num_new, std::int64_t batch) {
    const auto size = static_cast<std::int64_t>(rows_.size());
    if (size + num_new <= kCapacity) return;
    std::set<std::tuple<std::int64_t, std::int64_t, std::uint64_t, std::int64_t>> order;
    for (const auto& [key, row] : rows_) {
      if (row.first >= batch - 1) continue;
      order.insert({row.first, row.second, hash_key(hash_name("exact"), key), key});
    }
    std::int64_t excess = size + num_new - (kCapacity - 20);
    for (const auto& lowest : order) {
      if (excess-- == 0) break;
      rows_.erase(std::get<3>(lowest));
    }
  }

  std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> rows_;
  std::map<std::int64_t, std::int64_t> ghosts_;
};

// Retrievals, each undone and repeated now and then; what the store holds after each.
std::vector<Contents> history(int threads) {
  set_num_threads(threads);
  EmbeddingStore store(config_of());
  Dictionary dictionary;
  std::mt19937_64 random(11);
  std::vector<Contents> seen;
  for (std::int64_t batch = 0; batch < 60; ++batch) {
    Call call = random_call(&random, 300 + static_cast<std::int64_t>(random() % 4000), 700);
    if (batch % 3 == 1) {
      const Contents before = contents_of(store);
      Call next = random_call(&random, 2500, 800);
      call.retrieve(&store, batch);
      const std::vector<std::int64_t> handles = call.handles;
      const std::vector<std::uint8_t> status = call.status;
      // The next one frees what the batch before this one evicted, for good.
      const bool frees = batch % 2 == 0;
      if (frees) {
        next.retrieve(&store, batch + 1);
        next.undo(&store);
      }
      call.undo(&store);
      CHECK_EQUAL(contents_of(store) == before, true);
      call.retrieve(&store, batch);
      CHECK_EQUAL(call.status == status, true);
      if (!frees) CHECK_EQUAL(call.handles == handles, true);
    } else {
      call.retrieve(&store, batch);
    }
    const std::vector<std::uint8_t> expected = dictionary.retrieve(call, batch);
    for (std::size_t j = 0; j < expected.size(); ++j) {
      if (expected[j] != 255) CHECK_EQUAL(int{call.status[j]}, int{expected[j]});
      CHECK_EQUAL(call.handles[j] >= 0, call.status[j] <= 1);
    }
    std::vector<float> values(call.keys.size() * store.dim(), static_cast<float>(batch));
    std::vector<std::int64_t> once =
        call.handles;  // Rows may be written twice in a call only alike.
    std::set<std::int64_t> written;
    for (std::int64_t& handle : once) {
      if (!written.insert(handle).second) handle = -1;
    }
    store.write_embeddings(once.data(), call.in().size, values.data());
    seen.push_back(contents_of(store));
    dictionary.check(seen.back());
  }
  const TableCounters counters = store.counters(0);
  CHECK_EQUAL(counters.evicted > 500 && counters.not_admitted > 500, true);
  CHECK_EQUAL(store.counters(1).expired > 100, true);
  CHECK_EQUAL(store.counters(2).evicted > 500, true);
  return seen;
}

void test_retrieval_and_undo_do_what_a_dictionary_does() {
  const std::vector<Contents> one = history(1);
  CHECK_EQUAL(history(2) == one, true);
  CHECK_EQUAL(history(4) == one, true);
}

void test_failing_memory_changes_nothing() {
  set_num_threads(2);
  int failed_calls = 0;
  std::uint64_t limit = 60000;
  for (bool succeeded = false; !succeeded; limit += 9000) {
    std::mt19937_64 random(5);
    EmbeddingStore store(config_of(limit));
    Call before = random_call(&random, 1500, 300);
    Call call = random_call(&random, 6000, 3000);
    try {
      before.retrieve(&store, 0);
    } catch (const std::bad_alloc&) {
      continue;
    }
    const Contents contents = contents_of(store);
    try {
      call.retrieve(&store, 5);
      succeeded = true;
    } catch (const std::bad_alloc&) {
      ++failed_calls;
      CHECK_EQUAL(contents_of(store) == contents, true);
    }
  }
  CHECK_EQUAL(failed_calls > 3, true);
}

void test_a_score_that_throws_changes_nothing() {
  std::mt19937_64 random(6);
  EmbeddingStore store(config_of());
  Call before = random_call(&random, 3000, 400);
  before.retrieve(&store, 0);
  const Contents contents = contents_of(store);
  Call call = random_call(&random, 3000, 4000);
  const ScoreFunction fails = [&](const ScoreArguments&, double*) { store.size(0); };
  CHECK_THROWS(std::logic_error,
               store.retrieve(call.in(), call.counts.data(), 5, fails, call.out(), &call.journal));
  CHECK_EQUAL(contents_of(store) == contents, true);
  CHECK_THROWS(std::invalid_argument,
               store.retrieve(call.in(), call.counts.data(), 5, {}, call.out(), &call.journal));
  CHECK_EQUAL(contents_of(store) == contents, true);
}

void test_undo_is_refused_out_of_order_and_too_late() {
  std::mt19937_64 random(7);
  EmbeddingStore store(config_of());
  Call first = random_call(&random, 3000, 400);
  Call second = random_call(&random, 3000, 4000);
  Call third = random_call(&random, 100, 400);
  first.retrieve(&store, 0);
  second.retrieve(&store, 2);
  CHECK_THROWS(std::invalid_argument, first.undo(&store));
  third.retrieve(&store, 4);
  third.undo(&store);
  CHECK_THROWS(std::invalid_argument, third.undo(&store));
  CHECK_THROWS(std::invalid_argument, second.undo(&store));
  CHECK_THROWS(std::invalid_argument, store.evicted(second.journal));
}

void test_scores_keep_their_order_as_integers() {
  const double infinity = 1e308 * 10.0;
  const std::vector<double> ascending = {-infinity, -1e300, -2.0, -1.0,  -5e-324, 0.0,
                                         5e-324,    1.0,    2.0,  1e300, infinity};
  for (std::size_t i = 1; i < ascending.size(); ++i) {
    CHECK_EQUAL(ordered_bits(ascending[i - 1]) < ordered_bits(ascending[i]), true);
  }
  CHECK_EQUAL(ordered_bits(-0.0), ordered_bits(0.0));
}

}  // namespace
}  // namespace nestpipe

int main() {
  nestpipe::test_retrieval_and_undo_do_what_a_dictionary_does();
  nestpipe::test_failing_memory_changes_nothing();
  nestpipe::test_a_score_that_throws_changes_nothing();
  nestpipe::test_undo_is_refused_out_of_order_and_too_late();
  nestpipe::test_scores_keep_their_order_as_integers();
  return nestpipe::failures();
}
