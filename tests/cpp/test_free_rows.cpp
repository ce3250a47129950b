// Free rows against std::set, arrays in chunks, and where blocks of memory lie.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "nestpipe/free_rows.h"

namespace nestpipe {
namespace {

void test_lowest_rows_come_first() {
  MemoryAccount account;
  FreeRows free(&account);
  free.reserve(40000);
  std::set<std::uint32_t> expected;
  std::mt19937_64 random(3);
  for (int round = 0; round < 3000; ++round) {
    // Some rounds free a few rows far apart, some a crowd, some take all.
    const std::uint64_t range = round % 3 == 0 ? 40000 : 300;
    for (std::uint64_t i = random() % 40; i > 0; --i) {
      const auto row = static_cast<std::uint32_t>(random() % range + (round % 5 == 0 ? 0 : 20));
      if (row < 40000 && expected.insert(row).second) free.add(row);
    }
    CHECK_EQUAL(free.size(), static_cast<std::int64_t>(expected.size()));
    const std::size_t all = expected.size();
    const std::size_t count = round % 7 == 0 ? all : std::min<std::size_t>(all, random() % 50);
    std::vector<std::uint32_t> rows(count, 7);
    free.lowest(static_cast<std::int64_t>(count), rows.data());
    CHECK_EQUAL(std::equal(rows.begin(), rows.end(), expected.begin()), true);
    free.take(static_cast<std::int64_t>(count));
    for (const std::uint32_t row : rows) expected.erase(row);
  }
  // 625 words and 10 groups are used.
  CHECK_EQUAL(free.bytes_behind(40000), free.bytes() - 635 * sizeof(std::uint64_t));
}

void test_arrays_share_chunks_which_go_when_they_are_empty() {
  MemoryAccount account;
  {
    ChunkedArrays arrays(&account);
    std::vector<ChunkedArrays::Array> taken;
    const std::size_t bytes = 300001;
    for (int i = 0; i < 50; ++i) {
      taken.push_back(arrays.take(bytes));
      auto* const data = static_cast<char*>(taken.back().data());
      CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(data) % 64, 0u);
      CHECK_EQUAL(std::all_of(data, data + bytes, [](char c) { return c == 0; }), true);
      std::memset(data, i + 1, bytes);
    }
    for (int i = 0; i < 50; ++i) {
      const auto* const data = static_cast<const char*>(taken[i].data());
      CHECK_EQUAL(std::all_of(data, data + bytes, [i](char c) { return c == i + 1; }), true);
    }
    CHECK_EQUAL(taken[0].chunk() == taken[1].chunk(), true);
    CHECK_EQUAL(arrays.newest() == taken[49].chunk(), true);
    const std::size_t used = account.used_bytes();
    CHECK_EQUAL(used < 2 * 50 * bytes, true);
    taken.erase(taken.begin(), taken.begin() + 25);
    CHECK_EQUAL(account.used_bytes() < used, true);
    // Small ones and very large ones stand alone.
    for (const std::size_t alone : {std::size_t{640}, std::size_t{5} << 20}) {
      const std::size_t before = account.used_bytes();
      const ChunkedArrays::Array array = arrays.take(alone);
      CHECK_EQUAL(account.used_bytes(), before + alone);
      static_cast<char*>(array.data())[alone - 1] = 1;
    }
  }
  CHECK_EQUAL(account.used_bytes(), 0u);
}

void test_large_blocks_begin_at_huge_pages() {
  MemoryAccount account;
  for (const std::size_t bytes : {(std::size_t{2} << 20), (std::size_t{5} << 20) + 64}) {
    const Block block(&account, bytes);
    CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(block.data()) % (std::size_t{2} << 20), 0u);
    CHECK_EQUAL(account.used_bytes(), bytes);
    static_cast<char*>(block.data())[bytes - 1] = 1;
  }
}

}  // namespace
}  // namespace nestpipe

int main() {
  nestpipe::test_lowest_rows_come_first();
  nestpipe::test_arrays_share_chunks_which_go_when_they_are_empty();
  nestpipe::test_large_blocks_begin_at_huge_pages();
  return nestpipe::failures();
}
