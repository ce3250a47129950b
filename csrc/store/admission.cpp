// Decisions about new keys, and exact and approximate counts of keys without a row.
#include "nestpipe/admission.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace nestpipe {
namespace {

constexpr std::int64_t kLargestCount = std::int64_t{kNoRow} - 1;
constexpr std::int64_t kLargestCell = 255;
constexpr std::int64_t kCellsPerBlock = 512;  // At least; fewer would fill unevenly.

// More blocks than slices would leave some unused.
std::int64_t num_blocks_of(std::int64_t cells) {
  std::int64_t num_blocks = 1;
  while (num_blocks < kNumSlices && num_blocks * 2 * kCellsPerBlock <= cells) num_blocks *= 2;
  return num_blocks;
}

}  // namespace

AdmissionCounts::AdmissionCounts(const AdmissionRule& rule, std::uint64_t table_hash,
                                 MemoryAccount* account)
    : rule_(rule), account_(account), exact_(table_hash, account) {
  if (rule.kind != AdmissionKind::kMinFrequency || rule.filter_cells == 0) return;
  const std::int64_t num_blocks = num_blocks_of(rule.filter_cells);
  cells_per_block_ = rule.filter_cells / num_blocks;
  blocks_.resize(static_cast<std::size_t>(num_blocks));
}

bool AdmissionCounts::admits(std::uint64_t hash, std::int64_t occurrences) const {
  if (rule_.kind == AdmissionKind::kMinFrequency) return occurrences >= rule_.count;
  if (rule_.kind == AdmissionKind::kAll) return true;
  const std::uint64_t word = mix64(hash ^ mix64(rule_.seed ^ 0xD1B54A32D192ED03ull));
  return static_cast<double>(word >> 11) * 0x1p-53 < rule_.probability;
}

std::uint32_t AdmissionCounts::block_of(std::uint64_t hash) const {
  return static_cast<std::uint32_t>((std::uint64_t{slice_of(hash)} * blocks_.size()) >> 16);
}

AdmissionCounts::Cells AdmissionCounts::cells_of(std::uint64_t hash) const {
  auto* const cells = static_cast<std::uint8_t*>(blocks_[block_of(hash)].data());
  const std::uint64_t word = mix64(hash ^ 0x9E3779B97F4A7C15ull);
  auto place = static_cast<std::uint32_t>(word);
  const std::uint32_t step = static_cast<std::uint32_t>(word >> 32) | 1u;
  Cells found;
  for (std::uint8_t*& cell : found.at) {
    cell = cells + ((place * static_cast<std::uint64_t>(cells_per_block_)) >> 32);
    place += step;
  }
  return found;
}

std::int64_t AdmissionCounts::count(std::uint64_t hash, std::int64_t key) const {
  if (!counting()) return 0;
  if (!filtering()) {
    const std::uint32_t found = exact_.find(hash, key);
    return found == kNoRow ? 0 : std::int64_t{found};
  }
  if (blocks_[block_of(hash)].data() == nullptr) return 0;
  const Cells cells = cells_of(hash);
  return std::min(std::min(*cells.at[0], *cells.at[1]), std::min(*cells.at[2], *cells.at[3]));
}

void AdmissionCounts::reserve(std::uint64_t hash) {
  Block& block = blocks_[block_of(hash)];
  if (block.data() == nullptr) block = Block(account_, static_cast<std::size_t>(cells_per_block_));
}

std::uint32_t AdmissionCounts::add(std::uint64_t hash, std::int64_t key, std::int64_t occurrences) {
  const std::int64_t before = count(hash, key);
  const std::int64_t room = (filtering() ? kLargestCell : kLargestCount) - before;
  const std::int64_t total = before + std::min(occurrences, room);
  if (filtering()) {
    const Cells cells = cells_of(hash);
    std::uint32_t packed = 0;
    for (int i = 0; i < 4; ++i) packed |= std::uint32_t{*cells.at[i]} << (8 * i);
    for (std::uint8_t* const cell : cells.at) {
      *cell = std::max(*cell, static_cast<std::uint8_t>(total));
    }
    return packed;
  }
  if (total == 0) return 0;
  if (exact_.insert(hash, key, static_cast<std::uint32_t>(total)) != kNoRow) {
    exact_.assign(hash, key, static_cast<std::uint32_t>(total));
  }
  return static_cast<std::uint32_t>(before);
}

std::uint32_t AdmissionCounts::forget(std::uint64_t hash, std::int64_t key) {
  const std::uint32_t before = exact_.erase(hash, key);
  return before == kNoRow ? 0 : before;
}

void AdmissionCounts::restore(std::uint64_t hash, std::int64_t key, std::uint32_t before) {
  if (filtering()) {
    const Cells cells = cells_of(hash);
    for (int i = 0; i < 4; ++i) *cells.at[i] = static_cast<std::uint8_t>(before >> (8 * i));
  } else if (before == 0) {
    exact_.erase(hash, key);
  } else if (exact_.insert(hash, key, before) != kNoRow) {
    exact_.assign(hash, key, before);
  }
}

void AdmissionCounts::clear() {
  exact_ = KeyIndex(exact_.table_hash(), account_);
  for (Block& block : blocks_) block = Block();
}

std::uint64_t AdmissionCounts::bytes() const {
  std::uint64_t sum = exact_.bytes();
  for (const Block& block : blocks_) sum += block.bytes();
  return sum;
}

CountsState AdmissionCounts::state(int first, int end) const {
  CountsState state;
  std::vector<std::pair<std::int64_t, std::uint32_t>> counted;
  for (int shard = first; shard < end; ++shard) {
    counted.clear();
    exact_.for_each_in_shard(
        shard, [&](std::int64_t key, std::uint32_t count) { counted.emplace_back(key, count); });
    std::sort(counted.begin(), counted.end());
    for (const auto& [key, count] : counted) {
      state.keys.push_back(key);
      state.counts.push_back(count);
    }
  }
  const std::size_t end_block = blocks_.size() * static_cast<std::size_t>(end) / kNumShards;
  for (std::size_t b = blocks_.size() * static_cast<std::size_t>(first) / kNumShards; b < end_block;
       ++b) {
    const auto* const cells = static_cast<const std::uint8_t*>(blocks_[b].data());
    if (cells == nullptr) continue;
    const auto* const end = cells + cells_per_block_;
    if (std::all_of(cells, end, [](std::uint8_t cell) { return cell == 0; })) continue;
    state.keys.push_back(static_cast<std::int64_t>(b));
    state.cells.insert(state.cells.end(), cells, end);
  }
  return state;
}

void AdmissionCounts::load(const CountsState& state) {
  if (!filtering()) {
    for (std::size_t i = 0; i < state.keys.size(); ++i) {
      const std::int64_t count = std::min(state.counts[i], kLargestCount);
      restore(exact_.hash(state.keys[i]), state.keys[i], static_cast<std::uint32_t>(count));
    }
    return;
  }
  for (const std::int64_t block : state.keys) {
    if (block < 0 || block >= static_cast<std::int64_t>(blocks_.size())) {
      throw std::out_of_range("store: blocks of this filter are numbered below " +
                              std::to_string(blocks_.size()) + ", got " + std::to_string(block));
    }
    Block& own = blocks_[static_cast<std::size_t>(block)];
    if (own.data() == nullptr) own = Block(account_, static_cast<std::size_t>(cells_per_block_));
  }
  for (std::size_t i = 0; i < state.keys.size(); ++i) {
    auto* const cells =
        static_cast<std::uint8_t*>(blocks_[static_cast<std::size_t>(state.keys[i])].data());
    const std::uint8_t* const from = &state.cells[i * static_cast<std::size_t>(cells_per_block_)];
    for (std::int64_t c = 0; c < cells_per_block_; ++c) cells[c] = std::max(cells[c], from[c]);
  }
}

}  // namespace nestpipe
