// Positions of the (table, key) pairs that two lists share.
#pragma once

#include <cstdint>

#include "nestpipe/dedup.h"

namespace nestpipe {

// Returns the number m of positions of `b` whose pair is in `a`: index_b lists them ascending,
// index_a says where in `a` the pair stands (first position, should `a` repeat it). Outputs have
// room for b.size entries. Both lists have tables or neither.
std::int64_t intersect(const KeyList& a, const KeyList& b, std::int64_t* index_a,
                       std::int64_t* index_b);

}  // namespace nestpipe
