// Retrieval of occurrences: use that is noted and counted later is what anybody reads, at any
// number of threads, with other calls side by side.
#include <algorithm>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "nestpipe/parallel.h"
#include "nestpipe/store.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kDim = 4;
constexpr std::int64_t kNumKeys = 3000;
constexpr std::int64_t kCallSize = 40000;

StoreConfig config_of() {
  StoreConfig config{kDim, DataType::kFloat32, 1, 0.0f, ~std::uint64_t{0}, {}};
  for (const char* const name : {"a", "b"}) {
    config.tables.push_back(
        {hash_name(name), 1, {InitKind::kUniform, {-1.0, 1.0}}, -1, {}, false, {}, {}});
  }
  return config;
}

// Keys of two tables, and what retrieval says of them.
struct Call {
  explicit Call(std::int64_t size)
      : keys(size), tables(size), slots(size), handles(size), found(size), found_tables(size) {}

  KeySpan in() const {
    return {keys.data(), tables.data(), static_cast<std::int64_t>(keys.size())};
  }
  bool retrieve(EmbeddingStore* store, std::int64_t batch) {
    num_rows = store->retrieve_occurrences(
        in(), nullptr, batch, {slots.data(), handles.data(), found.data(), found_tables.data()},
        &journal);
    status.assign(static_cast<std::size_t>(std::max<std::int64_t>(num_rows, 0)),
                  static_cast<std::uint8_t>(KeyStatus::kFound));
    return num_rows >= 0;
  }
  void undo(EmbeddingStore* store) {
    store->undo({handles.data(), status.data()}, num_rows, &journal);
  }
  // The update of all rows it has, with gradients of 1.
  void update(EmbeddingStore* store) const {
    const auto size = static_cast<std::int64_t>(keys.size());
    std::vector<std::int64_t> offsets(static_cast<std::size_t>(size) + 1);
    for (std::int64_t j = 0; j <= size; ++j) offsets[j] = j;
    const std::vector<float> grads(static_cast<std::size_t>(size * kDim), 1.0f);
    BagList bags;
    bags.slots = slots.data();
    bags.num_occurrences = bags.num_bags = size;
    bags.bag_offsets = offsets.data();
    bags.segment_bags = {0, size};
    bags.segment_modes = {static_cast<std::int32_t>(PoolMode::kSum)};
    UpdateArguments arguments;
    arguments.lr = 0.1f;
    UpdateSettings settings;
    settings.rule = UpdateRule::kRowWiseAdagrad;
    store->update_pooled(handles.data(), num_rows, bags, {{grads.data(), kDim}}, arguments,
                         settings);
  }

  std::vector<std::int64_t> keys;
  std::vector<std::int32_t> tables;
  std::vector<std::int32_t> slots;
  std::vector<std::int64_t> handles;
  std::vector<std::int64_t> found;
  std::vector<std::int32_t> found_tables;
  std::vector<std::uint8_t> status;
  std::int64_t num_rows = 0;
  RetrievalJournal journal;
};

Call random_call(std::mt19937_64* random, std::int64_t size) {
  Call call(size);
  for (std::int64_t j = 0; j < size; ++j) {
    const double skewed = static_cast<double>((*random)() % 1000) / 1000.0;
    call.keys[j] = static_cast<std::int64_t>(skewed * skewed * kNumKeys);
    call.tables[j] = static_cast<std::int32_t>((*random)() % 2);
  }
  return call;
}

// All keys of both tables, with a row each.
Call filled(EmbeddingStore* store) {
  Call all(2 * kNumKeys);
  for (std::int64_t j = 0; j < 2 * kNumKeys; ++j) {
    all.keys[j] = j / 2;
    all.tables[j] = static_cast<std::int32_t>(j % 2);
  }
  std::vector<std::uint8_t> status(all.keys.size());
  store->retrieve(all.in(), nullptr, 0, {}, {all.handles.data(), status.data()}, &all.journal);
  return all;
}

struct Metadata {
  std::vector<std::int64_t> last_used;
  std::vector<std::int64_t> frequency;
  bool operator==(const Metadata& other) const {
    return last_used == other.last_used && frequency == other.frequency;
  }
};

Metadata read(const EmbeddingStore& store, const Call& all) {
  Metadata found{all.keys, all.keys};
  store.read_metadata(all.handles.data(), static_cast<std::int64_t>(all.keys.size()),
                      {found.last_used.data(), found.frequency.data()});
  return found;
}

// What `found` becomes by the use of the call's keys.
Metadata used(Metadata found, const Call& call, std::int64_t batch) {
  for (std::size_t j = 0; j < call.keys.size(); ++j) {
    const auto at = static_cast<std::size_t>(2 * call.keys[j] + call.tables[j]);
    found.last_used[at] = batch;
    ++found.frequency[at];
  }
  return found;
}

void test_use_is_counted_whenever_it_is_read(int threads) {
  set_num_threads(threads);
  EmbeddingStore store(config_of());
  const Call all = filled(&store);
  std::mt19937_64 random(5);
  Metadata expected = read(store, all);
  for (std::int64_t batch = 1; batch < 7; ++batch) {
    Call call = random_call(&random, kCallSize);
    CHECK_EQUAL(call.retrieve(&store, batch), true);
    const Metadata before = expected;
    expected = used(expected, call, batch);
    if (batch % 3 == 1) CHECK_EQUAL(read(store, all) == expected, true);
    if (batch % 3 != 2) call.update(&store);  // Of batch 2 and 5 the next call counts.
    if (batch == 4) {
      call.undo(&store);
      expected = before;
      CHECK_EQUAL(read(store, all) == expected, true);
    }
  }
  CHECK_EQUAL(read(store, all) == expected, true);
}

// An update of other rows, or of fewer, counts nothing and loses nothing.
void test_updates_of_other_rows() {
  set_num_threads(2);
  EmbeddingStore store(config_of());
  const Call all = filled(&store);
  std::mt19937_64 random(6);
  const Metadata before = read(store, all);
  Call first = random_call(&random, kCallSize);
  Call second = random_call(&random, 500);
  CHECK_EQUAL(first.retrieve(&store, 1), true);
  CHECK_EQUAL(second.retrieve(&store, 2), true);
  first.update(&store);
  second.update(&store);
  second.update(&store);
  CHECK_EQUAL(read(store, all) == used(used(before, first, 1), second, 2), true);
}

void test_undo_before_anything_is_counted() {
  set_num_threads(2);
  EmbeddingStore store(config_of());
  const Call all = filled(&store);
  std::mt19937_64 random(7);
  const Metadata before = read(store, all);
  Call call = random_call(&random, kCallSize);
  CHECK_EQUAL(call.retrieve(&store, 1), true);
  call.undo(&store);
  CHECK_EQUAL(read(store, all) == before, true);
  CHECK_THROWS(std::invalid_argument, call.undo(&store));
}

void test_a_row_that_goes_takes_its_use_along() {
  set_num_threads(2);
  EmbeddingStore store(config_of());
  const Call all = filled(&store);
  std::mt19937_64 random(8);
  Call call = random_call(&random, kCallSize);
  CHECK_EQUAL(call.retrieve(&store, 1), true);
  Call gone(1);
  gone.keys[0] = call.keys[0];
  gone.tables[0] = call.tables[0];
  std::uint8_t status;
  store.erase(gone.in(), &status);
  RetrievalJournal journal;
  store.retrieve(gone.in(), nullptr, 2, {}, {gone.handles.data(), &status}, &journal);
  std::int64_t last_used;
  std::int64_t frequency;
  store.read_metadata(gone.handles.data(), 1, {&last_used, &frequency});
  CHECK_EQUAL(last_used, 2);
  CHECK_EQUAL(frequency, 1);
}

// Steps of one thread beside searches, pooled reads and reads of metadata of others.
void test_calls_side_by_side() {
  set_num_threads(2);
  EmbeddingStore store(config_of());
  const Call all = filled(&store);
  std::mt19937_64 random(9);
  Metadata expected = read(store, all);
  std::vector<std::thread> readers;
  std::atomic<bool> done{false};
  for (int which = 0; which < 2; ++which) {
    readers.emplace_back([&, which] {
      std::int64_t most = 0;
      while (!done.load()) {
        if (which == 0) {
          const Metadata now = read(store, all);
          CHECK_EQUAL(now.frequency[0] >= most, true);
          most = now.frequency[0];
        } else {
          std::vector<std::int64_t> handles(all.keys.size());
          store.find(all.in(), handles.data());
          CHECK_EQUAL(handles == all.handles, true);
        }
      }
    });
  }
  for (std::int64_t batch = 1; batch < 6; ++batch) {
    Call call = random_call(&random, kCallSize);
    CHECK_EQUAL(call.retrieve(&store, batch), true);
    call.update(&store);
    expected = used(expected, call, batch);
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  CHECK_EQUAL(read(store, all) == expected, true);
}

}  // namespace
}  // namespace nestpipe

int main() {
  for (const int threads : {1, 2, 4}) nestpipe::test_use_is_counted_whenever_it_is_read(threads);
  nestpipe::test_updates_of_other_rows();
  nestpipe::test_undo_before_anything_is_counted();
  nestpipe::test_a_row_that_goes_takes_its_use_along();
  nestpipe::test_calls_side_by_side();
  return nestpipe::failures();
}
