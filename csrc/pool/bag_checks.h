// What all pooling operations check and look up in a list of bags; private to this folder.
#pragma once

#include <cstdint>

#include "nestpipe/host_device.h"
#include "nestpipe/lookup_pool.h"

namespace nestpipe {

// Offsets, segments, modes and slots fit together and into `num_rows` rows; throws before anything
// is written.
void check_bags(const BagList& bags, std::int64_t num_rows, std::size_t num_matrices);

bool has_mode(const BagList& bags, PoolMode mode);

// Calls visit(segment, bag) for each bag of [begin, end) in order.
template <typename Visit>
void for_each_bag(const BagList& bags, std::int64_t begin, std::int64_t end, const Visit& visit) {
  std::int64_t segment = 0;
  for (std::int64_t bag = begin; bag < end; ++bag) {
    while (bags.segment_bags[segment + 1] <= bag) ++segment;
    visit(segment, bag);
  }
}

// Slots of occurrences that have a row each.
struct OwnSlots {
  std::int64_t operator[](std::int64_t j) const { return j; }
};

// Calls body(slots) with the slots' own integer type, or OwnSlots.
template <typename Body>
void with_slots(const BagList& bags, const Body& body) {
  if (bags.own_rows) {
    body(OwnSlots{});
  } else if (bags.slots_are_int64) {
    body(static_cast<const std::int64_t*>(bags.slots));
  } else {
    body(static_cast<const std::int32_t*>(bags.slots));
  }
}

// The first of equal values wins, and so does the first NaN.
NESTPIPE_HOST_DEVICE inline bool beats_maximum(float value, float maximum) {
  return (value > maximum) | ((value != value) & (maximum == maximum));
}

}  // namespace nestpipe
