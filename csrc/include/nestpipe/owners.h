// Which rank owns each key: the shared hash's slice, looked up in the slice table.
#pragma once

#include <cstdint>

#include "nestpipe/dedup.h"

namespace nestpipe {

// owners[i] = slice_owner[slice of (table_hashes[tables[i]], keys[i])]; without tables all keys are
// of table 0. Returns -1, or the first position whose table is outside [0, num_tables); owners is
// unspecified then.
std::int64_t owners(const KeyList& input, const std::int64_t* table_hashes, std::int64_t num_tables,
                    const std::int32_t* slice_owner, std::int32_t* owners);

}  // namespace nestpipe
