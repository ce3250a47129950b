// Dedup of long lists with many distinct pairs: partition by hash first, so that every table fits
// the cache.
#pragma once

#include <cstdint>

#include "nestpipe/dedup.h"

namespace nestpipe {

// As dedup(), for lists that are not empty; worth its extra passes where one table would not fit
// the cache.
std::int64_t dedup_radix(const KeyList& input, std::int64_t* unique_index, std::int32_t* inverse,
                         std::int64_t* counts);

}  // namespace nestpipe
