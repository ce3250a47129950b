// The hash of a (table, key) pair of a list, where tables are numbers.
#pragma once

#include <cstdint>

#include "nestpipe/hash.h"

namespace nestpipe {

// For a fixed table distinct keys have distinct hashes: two pairs are equal where table and hash
// are. Low bits choose slots, high bits partitions.
NESTPIPE_HOST_DEVICE inline std::uint64_t hash_pair(std::int64_t key, std::int32_t table) {
  const auto salt = static_cast<std::uint64_t>(static_cast<std::uint32_t>(table));
  return hash_key(salt * 0x9E3779B97F4A7C15ull, key);
}

}  // namespace nestpipe
