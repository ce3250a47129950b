// Rows, bags and segments as they arrive from Python.
#pragma once

#include <pybind11/stl.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "nestpipe/lookup_pool.h"

namespace nestpipe {

using PoolAddress = std::uintptr_t;
// (address, num_rows, stride, dim)
using RowsTuple = std::tuple<PoolAddress, std::int64_t, std::int64_t, std::int64_t>;
// (slots, slots_are_int64, num_occurrences, bag_offsets, num_bags, weights)
using BagsTuple =
    std::tuple<PoolAddress, bool, std::int64_t, PoolAddress, std::int64_t, PoolAddress>;
using SegmentBags = std::vector<std::int64_t>;
using SegmentModes = std::vector<std::int32_t>;
// (address, stride) of each segment
using MatrixList = std::vector<std::pair<PoolAddress, std::int64_t>>;

inline RowMatrix to_rows(const RowsTuple& rows) {
  return {as_pointer<const float>(std::get<0>(rows)),
          std::get<1>(rows),
          std::get<2>(rows),
          std::get<3>(rows),
          nullptr,
          0};
}

inline BagList to_bags(const BagsTuple& bags, SegmentBags segment_bags,
                       SegmentModes segment_modes) {
  return {as_pointer<const void>(std::get<0>(bags)),
          std::get<1>(bags),
          std::get<2>(bags),
          as_pointer<const std::int64_t>(std::get<3>(bags)),
          std::get<4>(bags),
          std::move(segment_bags),
          std::move(segment_modes),
          as_pointer<const float>(std::get<5>(bags)),
          false};
}

template <typename Matrix, typename T>
std::vector<Matrix> to_matrices(const MatrixList& list) {
  std::vector<Matrix> matrices;
  for (const auto& [address, stride] : list) matrices.push_back({as_pointer<T>(address), stride});
  return matrices;
}

}  // namespace nestpipe
