// The missing keys of a call, between its two halves: what the first leaves in working memory.
#pragma once

#include "../cuda/carve.h"
#include "../cuda/scan.cuh"
#include "nestpipe/cuda/device_store.h"

namespace nestpipe {
namespace cuda {

// Missing ones are numbered in input order, with repetitions; an entry is one of those with the
// same pair.
struct MissingKeys {
  std::int32_t* position;  // [num_missing], of the call
  std::int32_t* new_at;    // [num_new] which missing one is the first with the pair
  std::int32_t* entry;     // [num_missing]
  std::int32_t* number;    // of entries: which of the new ones; before that the next in the chain
  std::int32_t* first;     // of entries: the first missing one with the pair
  std::int32_t* flags;     // [size]
  std::int32_t* heads;     // [num_slots] of chains
  std::int32_t* scan_work;
  std::int64_t num_slots;
};

inline MissingKeys lay_out_missing(Carve& carve, std::int64_t size) {
  MissingKeys missing{};
  missing.num_slots = 1;
  while (missing.num_slots < size) missing.num_slots *= 2;
  missing.position = carve.take<std::int32_t>(size);
  missing.new_at = carve.take<std::int32_t>(size);
  missing.entry = carve.take<std::int32_t>(size);
  missing.number = carve.take<std::int32_t>(size);
  missing.first = carve.take<std::int32_t>(size);
  missing.flags = carve.take<std::int32_t>(size);
  missing.heads = carve.take<std::int32_t>(missing.num_slots);
  missing.scan_work = carve.take<std::int32_t>(scan_work_items(size));
  return missing;
}

}  // namespace cuda
}  // namespace nestpipe
