// The one hash of (table, key) that routing, shards, tags and checkpoints share, and the name hash
// it starts from.
//
// Bits 48-63: virtual slice (65,536), 40-47: shard within a store, 32-39: tag, 0-31: group. Every
// step is a bijection of 64-bit words for a fixed table, so distinct keys of a table never collide
// in the full word, and no key value is special.
#pragma once

#include <cstdint>
#include <string_view>

#include "nestpipe/host_device.h"

namespace nestpipe {

// Multiply by odd constants and fold high bits down, twice: each input bit reaches every output
// field.
NESTPIPE_HOST_DEVICE inline std::uint64_t mix64(std::uint64_t x) {
  x ^= x >> 32;
  x *= 0x9FB21C651E98DF25ull;
  x ^= x >> 29;
  x *= 0xD6E8FEB86659FD93ull;
  x ^= x >> 32;
  return x;
}

NESTPIPE_HOST_DEVICE inline std::uint64_t hash_key(std::uint64_t table_hash, std::int64_t key) {
  return mix64(static_cast<std::uint64_t>(key) ^ table_hash);
}

// FNV-1a over the bytes of the name, then mixed: a table is known by its name alone.
inline std::uint64_t hash_name(std::string_view name) {
  std::uint64_t h = 0xCBF29CE484222325ull;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
  return mix64(h);
}

constexpr int kNumSlices = 65536;
inline std::uint32_t slice_of(std::uint64_t h) { return static_cast<std::uint32_t>(h >> 48); }
inline std::uint32_t shard_of(std::uint64_t h) {
  return static_cast<std::uint32_t>(h >> 40) & 0xFF;
}
NESTPIPE_HOST_DEVICE inline std::uint32_t tag_of(std::uint64_t h) {
  return static_cast<std::uint32_t>(h >> 32) & 0xFF;
}
NESTPIPE_HOST_DEVICE inline std::uint32_t group_of(std::uint64_t h) {
  return static_cast<std::uint32_t>(h);
}

}  // namespace nestpipe
