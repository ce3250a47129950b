// Slabs: every record has its own bytes, none moves, and addresses may be asked for while others
// are made.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "check.h"
#include "nestpipe/memory.h"
#include "nestpipe/slabs.h"

namespace nestpipe {
namespace {

void test_records_are_apart_and_stay(std::size_t bytes) {
  MemoryAccount account;
  Slabs slabs(bytes, &account);
  std::vector<char*> places;
  for (std::uint64_t count = 1; count < 30000; count += count / 3 + 1) {
    slabs.reserve(count);
    CHECK_EQUAL(slabs.capacity() >= count, true);
    while (places.size() < count) {
      char* const at = static_cast<char*>(slabs.at(places.size()));
      for (std::size_t b = 0; b < bytes; ++b) CHECK_EQUAL(static_cast<int>(at[b]), 0);
      std::memset(at, static_cast<int>(places.size() % 127) + 1, bytes);
      places.push_back(at);
    }
  }
  for (std::size_t r = 0; r < places.size(); ++r) {
    CHECK_EQUAL(slabs.at(r) == places[r], true);
    CHECK_EQUAL(static_cast<int>(places[r][0]), static_cast<int>(r % 127) + 1);
    CHECK_EQUAL(static_cast<int>(places[r][bytes - 1]), static_cast<int>(r % 127) + 1);
    const std::uint64_t run = slabs.run(r);
    CHECK_EQUAL(run >= 1, true);
    if (run > 1 && r + 1 < places.size())
      CHECK_EQUAL(places[r + 1] - places[r], std::int64_t(bytes));
  }
}

void test_bytes_behind_and_growth_by_an_eighth() {
  MemoryAccount account;
  Slabs slabs(64, &account);
  for (std::uint64_t count = 1000; count < 1000000; count = count * 5 / 4) {
    slabs.reserve(count);
    CHECK_EQUAL(slabs.bytes() >= count * 64, true);
    CHECK_EQUAL(slabs.bytes_behind(count), slabs.bytes() - count * 64);
    CHECK_EQUAL(slabs.capacity() <= count + count / 7 + 64, true);
  }
}

void test_failing_memory_keeps_what_is_there() {
  MemoryAccount account(200000);
  Slabs slabs(64, &account);
  slabs.reserve(1000);
  void* const first = slabs.at(0);
  CHECK_THROWS(std::bad_alloc, slabs.reserve(1000000));
  CHECK_EQUAL(slabs.at(0) == first, true);
  CHECK_EQUAL(slabs.capacity() >= 1000, true);
  CHECK_EQUAL(slabs.bytes() <= 200000, true);
}

// One thread makes records and tells how many there are; the other writes to them.
void test_addresses_beside_growth() {
  constexpr std::uint64_t kRecords = 200000;
  MemoryAccount account;
  Slabs slabs(16, &account);
  std::atomic<std::uint64_t> there{0};
  std::thread grower([&] {
    for (std::uint64_t count = 1; count < kRecords; count += 997) {
      slabs.reserve(count);
      there.store(count, std::memory_order_release);
    }
    there.store(kRecords, std::memory_order_release);
  });
  std::uint64_t written = 0;
  for (std::uint64_t now = 0; now < kRecords;) {
    now = there.load(std::memory_order_acquire);
    const std::uint64_t end = now == kRecords ? written : now;
    for (; written < end; ++written) {
      *static_cast<std::uint64_t*>(slabs.at(written)) = written;
    }
  }
  grower.join();
  for (std::uint64_t r = 0; r < written; ++r) {
    CHECK_EQUAL(*static_cast<const std::uint64_t*>(slabs.at(r)), r);
  }
}

}  // namespace
}  // namespace nestpipe

int main() {
  for (const std::size_t bytes : {4, 48, 320, 6400})
    nestpipe::test_records_are_apart_and_stay(bytes);
  nestpipe::test_bytes_behind_and_growth_by_an_eighth();
  nestpipe::test_failing_memory_keeps_what_is_there();
  nestpipe::test_addresses_beside_growth();
  return nestpipe::failures();
}
