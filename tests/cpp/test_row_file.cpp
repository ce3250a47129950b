// Rows in a file of which little fits into memory: the same values as in memory, while other
// threads warm any rows. Meant to run under AddressSanitizer, UndefinedBehaviorSanitizer and
// ThreadSanitizer too.
#include <atomic>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "nestpipe/parallel.h"
#include "nestpipe/store.h"

namespace {

using namespace nestpipe;

constexpr std::int64_t kKeys = 6000;
constexpr std::int64_t kBatch = 400;
constexpr std::int64_t kSteps = 40;
constexpr std::size_t kLimit = std::size_t{1} << 16;

StoreConfig config_of(const std::string& directory) {
  StoreConfig config;
  config.dim = 61;
  config.state_floats = 1;
  config.file_directory = directory;
  config.file_limit_bytes = kLimit;
  TableConfig table;
  table.hash = hash_name("t");
  table.quota = 4000;
  table.eviction = {EvictionKind::kLru, 3600, 0, 1};
  config.tables.push_back(table);
  return config;
}

std::vector<std::int64_t> keys_of(unsigned seed, std::int64_t size) {
  std::mt19937 generator(seed);
  std::vector<std::int64_t> keys(size);
  for (std::int64_t& key : keys) key = static_cast<std::int64_t>(generator() % kKeys);
  return keys;
}

// Retrieves, adds to every row, writes back; some retrievals are undone. All rows by key at the
// end.
std::vector<float> train(EmbeddingStore* store) {
  const std::vector<std::int32_t> tables(kKeys, 0);
  const std::int64_t width = floats_per_row(store->embedding_words(), 1);
  std::vector<std::int64_t> handles(kBatch);
  std::vector<std::uint8_t> status(kBatch);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const std::vector<std::int64_t> keys = keys_of(static_cast<unsigned>(step), kBatch);
    const KeySpan in{keys.data(), tables.data(), kBatch};
    for (const bool undone : {true, false}) {
      if (undone && step % 3 != 0) continue;
      RetrievalJournal journal;
      store->retrieve(in, nullptr, step, {}, {handles.data(), status.data()}, &journal);
      if (undone) store->undo({handles.data(), status.data()}, kBatch, &journal);
    }
    std::vector<float> rows(kBatch * width);
    store->gather(handles.data(), in, nullptr, rows.data(), kBatch);
    // Rows of keys that come twice are equal, as write_back asks for.
    for (std::int64_t j = 0; j < kBatch; ++j) rows[j * width] += static_cast<float>(keys[j] + step);
    store->write_back(handles.data(), kBatch, rows.data());
  }
  std::vector<std::int64_t> keys(kKeys);
  for (std::int64_t key = 0; key < kKeys; ++key) keys[key] = key;
  handles.resize(kKeys);
  const KeySpan all{keys.data(), tables.data(), kKeys};
  store->find(all, handles.data());
  std::vector<float> rows(kKeys * width);
  store->gather(handles.data(), all, nullptr, rows.data(), kKeys);
  return rows;
}

void test_warming_beside_everything(const std::string& directory) {
  EmbeddingStore plain(config_of(""));
  EmbeddingStore tiered(config_of(directory));
  std::atomic<bool> done{false};
  std::vector<std::thread> warmers;
  for (unsigned w = 0; w < 2; ++w) {
    warmers.emplace_back([&, w] {
      const std::vector<std::int32_t> tables(kBatch, 0);
      for (unsigned seed = 1000 * (w + 1); !done.load(); ++seed) {
        const std::vector<std::int64_t> keys = keys_of(seed, kBatch);
        tiered.warm({keys.data(), tables.data(), kBatch});
        tiered.file_counters();
        std::this_thread::yield();
      }
    });
  }
  const std::vector<float> expected = train(&plain);
  const std::vector<float> found = train(&tiered);
  done.store(true);
  for (std::thread& warmer : warmers) warmer.join();
  CHECK_EQUAL(found == expected, true);
  const RowFileCounters counters = tiered.file_counters();
  CHECK_EQUAL(counters.limit_pages * counters.page_bytes, kLimit);
  CHECK_EQUAL(counters.dropped_pages > counters.limit_pages, true);
  CHECK_EQUAL(counters.written_pages > counters.limit_pages, true);
  CHECK_EQUAL(counters.read_pages, counters.dropped_pages + counters.resident_pages);
}

void test_a_directory_that_is_not_there() {
  CHECK_THROWS(FileError, EmbeddingStore{config_of("/no/such/directory")});
}

}  // namespace

int main() {
  set_num_threads(2);
  const char* const directory = std::getenv("TMPDIR");
  test_warming_beside_everything(directory == nullptr ? "/tmp" : directory);
  test_a_directory_that_is_not_there();
  return failures();
}
