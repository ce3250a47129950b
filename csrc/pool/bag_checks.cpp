// Checks of a list of bags; the messages name what, expected and got.
#include "bag_checks.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace nestpipe {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::invalid_argument("lookup_pool: " + what);
}

void check_ascending(const char* name, const std::int64_t* values, std::int64_t size,
                     std::int64_t last, const char* last_name) {
  if (values[0] != 0) {
    fail(std::string(name) + " must start at 0, got " + std::to_string(values[0]));
  }
  for (std::int64_t i = 0; i < size; ++i) {
    if (values[i + 1] < values[i]) {
      fail(std::string(name) + " must not decrease, got " + std::to_string(values[i]) + " then " +
           std::to_string(values[i + 1]) + " at position " + std::to_string(i + 1));
    }
  }
  if (values[size] != last) {
    fail(std::string(name) + " must end at the number of " + last_name + " (" +
         std::to_string(last) + "), got " + std::to_string(values[size]));
  }
}

void check_modes(const BagList& bags) {
  for (std::int64_t s = 0; s < bags.num_segments(); ++s) {
    const std::int32_t mode = bags.segment_modes[s];
    if (mode < 0 || mode > 3) {
      fail("segment_modes must be 0 (sum), 1 (mean), 2 (max) or 3 (none), got " +
           std::to_string(mode) + " for segment " + std::to_string(s));
    }
    const bool weightless = mode == 1 || mode == 2;
    if (bags.weights != nullptr && weightless) {
      fail("per-sample weights need pooling sum or none, got " +
           std::string(mode == 1 ? "mean" : "max") + " for segment " + std::to_string(s));
    }
    if (mode != static_cast<std::int32_t>(PoolMode::kNone)) continue;
    for (std::int64_t bag = bags.segment_bags[s]; bag < bags.segment_bags[s + 1]; ++bag) {
      const std::int64_t length = bags.bag_offsets[bag + 1] - bags.bag_offsets[bag];
      if (length != 1) {
        fail("pooling none needs exactly one occurrence per bag, got " + std::to_string(length) +
             " in bag " + std::to_string(bag));
      }
    }
  }
}

void check_slots(OwnSlots, std::int64_t size, std::int64_t num_rows) {
  if (size == num_rows) return;
  fail("without slots, expected a row for each of " + std::to_string(size) + " occurrences, got " +
       std::to_string(num_rows) + " rows");
}

template <typename Slot>
void check_slots(const Slot* slots, std::int64_t size, std::int64_t num_rows) {
  Slot smallest = 0;
  Slot largest = -1;
  for (std::int64_t j = 0; j < size; ++j) {
    smallest = slots[j] < smallest ? slots[j] : smallest;
    largest = slots[j] > largest ? slots[j] : largest;
  }
  if (smallest >= -1 && static_cast<std::int64_t>(largest) < num_rows) return;
  std::int64_t position = 0;
  while (slots[position] >= -1 && static_cast<std::int64_t>(slots[position]) < num_rows) {
    ++position;
  }
  throw std::out_of_range("lookup_pool: slots must lie in [-1, " + std::to_string(num_rows) +
                          ") where -1 is padding, got " + std::to_string(slots[position]) +
                          " at position " + std::to_string(position));
}

}  // namespace

void check_bags(const BagList& bags, std::int64_t num_rows, std::size_t num_matrices) {
  const std::int64_t num_segments = bags.num_segments();
  if (bags.segment_bags.size() != bags.segment_modes.size() + 1) {
    fail("segment_bags must have one entry more than segment_modes (" +
         std::to_string(num_segments) + "), got " + std::to_string(bags.segment_bags.size()));
  }
  if (num_matrices != bags.segment_modes.size()) {
    fail("expected one matrix per segment (" + std::to_string(num_segments) + "), got " +
         std::to_string(num_matrices));
  }
  // Sorted occurrences are kept as 32-bit numbers.
  if (bags.num_occurrences > std::numeric_limits<std::uint32_t>::max() ||
      bags.num_bags > std::numeric_limits<std::uint32_t>::max()) {
    fail("a call takes at most 4294967295 occurrences and bags: split the batch");
  }
  check_ascending("segment_bags", bags.segment_bags.data(), num_segments, bags.num_bags, "bags");
  check_ascending("bag_offsets", bags.bag_offsets, bags.num_bags, bags.num_occurrences, "slots");
  check_modes(bags);
  with_slots(bags, [&](auto slots) { check_slots(slots, bags.num_occurrences, num_rows); });
}

bool has_mode(const BagList& bags, PoolMode mode) {
  for (const std::int32_t m : bags.segment_modes) {
    if (m == static_cast<std::int32_t>(mode)) return true;
  }
  return false;
}

}  // namespace nestpipe
