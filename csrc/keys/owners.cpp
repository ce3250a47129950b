// Owners of keys: hash, take the slice, look its owner up.
#include "nestpipe/owners.h"

#include <atomic>

#include "nestpipe/hash.h"
#include "nestpipe/parallel.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kGrain = 16384;

void keep_minimum(std::atomic<std::int64_t>& least, std::int64_t value) {
  std::int64_t seen = least.load();
  while (value < seen && !least.compare_exchange_weak(seen, value)) {
  }
}

}  // namespace

std::int64_t owners(const KeyList& input, const std::int64_t* table_hashes, std::int64_t num_tables,
                    const std::int32_t* slice_owner, std::int32_t* owners) {
  std::atomic<std::int64_t> first_bad{input.size};
  parallel_ranges(input.size, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t table = input.tables ? input.tables[i] : 0;
      if (table < 0 || table >= num_tables) {
        keep_minimum(first_bad, i);
        return;
      }
      const auto table_hash = static_cast<std::uint64_t>(table_hashes[table]);
      owners[i] = slice_owner[slice_of(hash_key(table_hash, input.keys[i]))];
    }
  });
  return first_bad < input.size ? first_bad.load() : -1;
}

}  // namespace nestpipe
