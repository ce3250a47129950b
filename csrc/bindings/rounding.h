// What stochastic rounding depends on, as it arrives from Python.
#pragma once

#include <tuple>

#include "bindings.h"
#include "nestpipe/row_storage.h"

namespace nestpipe {

// (keys, tables, table hashes, table seeds, step)
using RoundingTuple =
    std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::int64_t>;

inline RandomRounding to_rounding(const RoundingTuple& given) {
  return {as_pointer<const std::int64_t>(std::get<0>(given)),
          as_pointer<const std::int32_t>(std::get<1>(given)),
          as_pointer<const std::uint64_t>(std::get<2>(given)),
          as_pointer<const std::uint64_t>(std::get<3>(given)), std::get<4>(given)};
}

}  // namespace nestpipe
