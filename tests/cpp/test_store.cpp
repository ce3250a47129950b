// The store: the same result at any number of threads, failing memory at any point, and calls side
// by side.
#include <algorithm>
#include <cstring>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "nestpipe/parallel.h"
#include "nestpipe/store.h"

namespace nestpipe {
namespace {

StoreConfig config_of(std::int64_t dim, std::uint64_t limit_bytes = ~std::uint64_t{0}) {
  StoreConfig config{dim, DataType::kFloat32, dim, 0.25f, limit_bytes, {}};
  config.tables.push_back(
      {hash_name("a"), 1, {InitKind::kUniform, {-1.0, 1.0}}, -1, {}, false, {}, {}});
  config.tables.push_back(
      {hash_name("b"), 2, {InitKind::kNormal, {0.0, 1.0}}, 3000, {}, false, {}, {}});
  return config;
}

struct Call {
  explicit Call(std::int64_t size) : keys(size), tables(size), handles(size), status(size) {}

  KeySpan in() const {
    return {keys.data(), tables.data(), static_cast<std::int64_t>(keys.size())};
  }
  RetrievalSpan out() { return {handles.data(), status.data()}; }
  void retrieve(EmbeddingStore* store, std::int64_t batch) {
    store->retrieve(in(), nullptr, batch, {}, out(), &journal);
  }
  void undo(EmbeddingStore* store) {
    store->undo(out(), static_cast<std::int64_t>(keys.size()), &journal);
  }

  std::vector<std::int64_t> keys;
  std::vector<std::int32_t> tables;
  std::vector<std::int64_t> handles;
  std::vector<std::uint8_t> status;
  RetrievalJournal journal;
};

Call random_call(std::mt19937_64* random, std::int64_t size, std::uint64_t key_range) {
  Call call(size);
  for (std::int64_t j = 0; j < size; ++j) {
    call.keys[j] = static_cast<std::int64_t>((*random)() % key_range) - 100;
    call.tables[j] = static_cast<std::int32_t>((*random)() % 2);
  }
  return call;
}

// Everything that a sequence of retrievals, one undo and one erase answers and leaves behind.
std::vector<std::int64_t> history(int threads) {
  set_num_threads(threads);
  EmbeddingStore store(config_of(5));
  std::mt19937_64 random(7);
  std::vector<std::int64_t> seen;
  for (int round = 0; round < 6; ++round) {
    Call call = random_call(&random, 9000, 20000);
    call.retrieve(&store, round);
    if (round == 2) {
      call.undo(&store);
      call.retrieve(&store, round);
    }
    seen.insert(seen.end(), call.handles.begin(), call.handles.end());
    seen.insert(seen.end(), call.status.begin(), call.status.end());
    seen.insert(seen.end(), call.journal.last_used.get(), call.journal.last_used.get() + 9000);
    seen.insert(seen.end(), call.journal.frequency.get(), call.journal.frequency.get() + 9000);
    std::vector<float> rows(9000 * store.row_floats());
    store.gather(call.handles.data(), call.in(), nullptr, rows.data(), 9000);
    for (const float value : rows) {
      std::int32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      seen.push_back(bits);
    }
    Call gone = random_call(&random, 1500, 20000);
    store.erase(gone.in(), gone.status.data());
    seen.insert(seen.end(), gone.status.begin(), gone.status.end());
  }
  for (std::int64_t table = 0; table < 2; ++table) {
    std::vector<std::int64_t> keys;
    std::vector<std::int64_t> handles;
    store.export_table(table, &keys, &handles);
    seen.insert(seen.end(), keys.begin(), keys.end());
    seen.insert(seen.end(), handles.begin(), handles.end());
    CHECK_EQUAL(static_cast<std::int64_t>(keys.size()), store.size(table));
  }
  CHECK_EQUAL(store.size(1) <= 3000, true);
  return seen;
}

void test_threads_do_not_change_the_result() {
  const std::vector<std::int64_t> one = history(1);
  CHECK_EQUAL(history(2) == one, true);
  CHECK_EQUAL(history(4) == one, true);
}

// Runs a second retrieval under every limit from none of its allocations to all of them.
void test_failing_memory_leaves_the_store_as_it_was() {
  set_num_threads(2);
  int failed_calls = 0;
  std::uint64_t limit = 0;
  for (bool succeeded = false; !succeeded; limit += 20000) {
    EmbeddingStore store(config_of(3, limit));
    std::mt19937_64 random(3);
    Call before = random_call(&random, 300, 1000);
    Call call = random_call(&random, 5000, 100000);
    try {
      before.retrieve(&store, 0);
    } catch (const std::bad_alloc&) {
      CHECK_EQUAL(store.size(0) + store.size(1), 0);
      continue;
    }
    const std::int64_t size = store.size(0) + store.size(1);
    std::vector<std::int64_t> found(call.keys.size());
    store.find(call.in(), found.data());
    try {
      call.retrieve(&store, 1);
      succeeded = true;
    } catch (const std::bad_alloc&) {
      ++failed_calls;
      std::vector<std::int64_t> again(call.keys.size());
      store.find(call.in(), again.data());
      CHECK_EQUAL(again == found, true);
      CHECK_EQUAL(store.size(0) + store.size(1), size);
      std::vector<std::int64_t> last_used(300);
      std::vector<std::int64_t> frequency(300);
      store.read_metadata(before.handles.data(), 300, {last_used.data(), frequency.data()});
      CHECK_EQUAL(*std::max_element(last_used.begin(), last_used.end()), 0);
    }
  }
  CHECK_EQUAL(failed_calls > 3, true);
}

// Rows are written and read by handle while another thread inserts: what a pipeline does between
// two batches.
void test_rows_by_handle_beside_insertion() {
  set_num_threads(2);
  EmbeddingStore store(config_of(4));
  std::mt19937_64 random(5);
  Call first(500);
  for (std::int64_t j = 0; j < 500; ++j) first.keys[j] = j;
  first.retrieve(&store, 0);
  std::thread inserting([&] {
    for (int round = 0; round < 20; ++round) {
      Call call = random_call(&random, 2000, 1ull << 40);
      call.retrieve(&store, round);
    }
  });
  std::vector<float> rows(500 * store.row_floats());
  for (int round = 0; round < 50; ++round) {
    std::fill(rows.begin(), rows.end(), static_cast<float>(round));
    store.write_back(first.handles.data(), 500, rows.data());
    std::vector<float> read(500 * store.dim());
    store.read_embeddings(first.handles.data(), first.in(), read.data());
    CHECK_EQUAL(std::count(read.begin(), read.end(), static_cast<float>(round)),
                static_cast<std::ptrdiff_t>(read.size()));
  }
  inserting.join();
}

void test_bad_handles_tables_and_places_are_refused() {
  EmbeddingStore store(config_of(2));
  Call call(2);
  call.tables[1] = 2;
  CHECK_THROWS(std::out_of_range, call.retrieve(&store, 0));
  call.tables[1] = -1;
  CHECK_THROWS(std::out_of_range, store.find(call.in(), call.handles.data()));
  call.tables[1] = 0;
  call.handles = {0, -1};
  std::vector<float> rows(2 * store.row_floats());
  CHECK_THROWS(std::out_of_range, store.write_back(call.handles.data(), 2, rows.data()));
  call.handles = {-1, -1};
  const std::vector<std::int64_t> places = {0, 2};
  CHECK_THROWS(std::out_of_range,
               store.gather(call.handles.data(), call.in(), places.data(), rows.data(), 2));
  CHECK_THROWS(std::invalid_argument, EmbeddingStore(config_of(0)));
}

}  // namespace
}  // namespace nestpipe

int main() {
  nestpipe::test_threads_do_not_change_the_result();
  nestpipe::test_failing_memory_leaves_the_store_as_it_was();
  nestpipe::test_rows_by_handle_beside_insertion();
  nestpipe::test_bad_handles_tables_and_places_are_refused();
  return nestpipe::failures();
}
