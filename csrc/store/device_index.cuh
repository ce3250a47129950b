// The index of a store in device memory: search, entering and taking out of one pair by one thread.
// Layout and phases: nestpipe/cuda/device_store.h.
#pragma once

#include "nestpipe/cuda/device_store.h"
#include "nestpipe/cuda/platform.h"
#include "nestpipe/hash.h"

namespace nestpipe {
namespace cuda {

constexpr int kCountShift = 24;  // of the count, in a bucket's last word
constexpr std::uint32_t kMostCounted = 255;

__device__ __forceinline__ std::int64_t home_bucket(const DeviceIndex& index, std::uint64_t hash) {
  return static_cast<std::int64_t>(
      (std::uint64_t{group_of(hash)} * static_cast<std::uint64_t>(index.num_buckets)) >> 32);
}

__device__ __forceinline__ std::int64_t bucket_after(const DeviceIndex& index,
                                                     std::int64_t bucket) {
  return bucket + 1 == index.num_buckets ? 0 : bucket + 1;
}

// Never 0.
__device__ __forceinline__ std::uint32_t tag_byte(std::uint64_t hash) {
  const std::uint32_t tag = tag_of(hash);
  return tag == 0 ? 1 : tag;
}

// Bit i: byte i of the word is `byte`.
__device__ __forceinline__ std::uint32_t equal_bytes(std::uint32_t word, std::uint32_t byte) {
  constexpr std::uint32_t kLow = 0x7F7F7F7Fu;
  const std::uint32_t other = word ^ byte * 0x01010101u;
  const std::uint32_t zero = ~(((other & kLow) + kLow) | other | kLow);  // the high bit of each
  return (zero >> 7) * 0x01020408u >> 24;
}

// Bit i: slot i has the tag.
__device__ __forceinline__ std::uint32_t equal_slots(const uint4& tags, std::uint32_t tag) {
  const std::uint32_t slots = equal_bytes(tags.x, tag) | equal_bytes(tags.y, tag) << 4 |
                              equal_bytes(tags.z, tag) << 8 | equal_bytes(tags.w, tag) << 12;
  return slots & ((1u << kSlotsPerBucket) - 1u);
}

struct FoundPair {
  std::uint32_t row;  // kNoRowNumber: not there
  std::int64_t bucket;
  int slot;
};

__device__ __forceinline__ FoundPair find_pair(const DeviceIndex& index, std::uint64_t hash,
                                               std::int64_t key, std::int32_t table) {
  const std::uint32_t tag = tag_byte(hash);
  std::int64_t bucket = home_bucket(index, hash);
  for (std::int64_t step = 0; step < index.num_buckets; ++step) {
    const uint4 tags = reinterpret_cast<const uint4*>(index.tags)[bucket];
    for (std::uint32_t slots = equal_slots(tags, tag); slots != 0; slots &= slots - 1) {
      const int slot = __ffs(static_cast<int>(slots)) - 1;
      const IndexEntry* const at = index.entries + bucket * kSlotsPerBucket + slot;
      const uint4 words = *reinterpret_cast<const uint4*>(at);
      const std::uint64_t found = std::uint64_t{words.y} << 32 | words.x;
      if (found == static_cast<std::uint64_t>(key) && static_cast<std::int32_t>(words.w) == table) {
        return {words.z, bucket, slot};
      }
    }
    if (tags.w >> kCountShift == 0) break;
    bucket = bucket_after(index, bucket);
  }
  return {kNoRowNumber, 0, 0};
}

// word[0] becomes changed(word[0]), other threads' changes kept.
template <typename Change>
__device__ __forceinline__ void change_word(std::uint32_t* word, const Change& changed) {
  std::uint32_t seen = load_racing(word);
  for (;;) {
    const std::uint32_t before = atomicCAS(word, seen, changed(seen));
    if (before == seen) return;
    seen = before;
  }
}

// Puts the tag into an empty one of the word's bytes (bits of `bytes`); -1: there is none.
__device__ __forceinline__ int claim_byte(std::uint32_t* word, std::uint32_t seen,
                                          std::uint32_t bytes, std::uint32_t tag) {
  for (;;) {
    const std::uint32_t empty = equal_bytes(seen, 0) & bytes;
    if (empty == 0) return -1;
    const int byte = __ffs(static_cast<int>(empty)) - 1;
    const std::uint32_t before = atomicCAS(word, seen, seen | tag << 8 * byte);
    if (before == seen) return byte;
    seen = before;
  }
}

// Enters a pair that is not there, while nobody searches or takes out. False: no slot is empty.
__device__ __forceinline__ bool enter_pair(const DeviceIndex& index, std::uint64_t hash,
                                           const IndexEntry& entry) {
  const std::uint32_t tag = tag_byte(hash);
  std::int64_t bucket = home_bucket(index, hash);
  for (std::int64_t step = 0; step < index.num_buckets; ++step) {
    std::uint32_t* const words = index.tags + bucket * 4;
    // Slots only fill up: an old view of them costs a try, nothing more.
    const uint4 seen = *reinterpret_cast<const uint4*>(words);
    const std::uint32_t empty = equal_slots(seen, 0);
    for (int w = 0; w < 4; ++w) {
      if ((empty >> 4 * w & 0xFu) == 0) continue;
      const std::uint32_t word = w == 0 ? seen.x : w == 1 ? seen.y : w == 2 ? seen.z : seen.w;
      const int byte = claim_byte(words + w, word, w == 3 ? 0x7u : 0xFu, tag);
      if (byte < 0) continue;
      index.entries[bucket * kSlotsPerBucket + 4 * w + byte] = entry;
      return true;
    }
    change_word(words + 3, [](std::uint32_t word) {
      return word >> kCountShift == kMostCounted ? word : word + (1u << kCountShift);
    });
    bucket = bucket_after(index, bucket);
  }
  return false;
}

// Takes out a pair that is there, while nobody searches for others than such, or enters.
__device__ __forceinline__ void take_out_pair(const DeviceIndex& index, std::uint64_t hash,
                                              std::int64_t key, std::int32_t table) {
  const FoundPair found = find_pair(index, hash, key, table);
  if (found.row == kNoRowNumber) return;
  std::uint32_t* const words = index.tags + found.bucket * 4;
  const std::uint32_t mask = ~(0xFFu << found.slot % 4 * 8);
  change_word(words + found.slot / 4, [mask](std::uint32_t word) { return word & mask; });
  for (std::int64_t bucket = home_bucket(index, hash); bucket != found.bucket;
       bucket = bucket_after(index, bucket)) {
    change_word(index.tags + bucket * 4 + 3, [](std::uint32_t word) {
      return word >> kCountShift == kMostCounted ? word : word - (1u << kCountShift);
    });
  }
}

}  // namespace cuda
}  // namespace nestpipe
