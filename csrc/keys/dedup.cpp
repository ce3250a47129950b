// Dedup in four steps. Parts of the list deal their pairs to partitions by hash. Each partition
// gives its distinct pairs ids, in order, and counts them. Each part turns the ids of pairs that
// first appear in it into numbers, in order, and looks up those of the others; ids of pairs that
// first appear in an earlier part it leaves (as their complements) for the last step, when all are
// known.
#include "nestpipe/dedup.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "nestpipe/memory.h"
#include "nestpipe/parallel.h"
#include "pair_parts.h"
#include "pair_table.h"
#include "scratch.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kPartitionSize = 8192;
constexpr int kMaxPartitionBits = 10;
constexpr std::int64_t kMinPartSize = 16384;
// Each part has an id of its own to look at in place of ones that belong to earlier parts; these
// are two lines apart.
constexpr std::int64_t kSpareIds = 32;

}  // namespace

class Dedup::Steps {
 public:
  explicit Steps(const KeyList& list) : list_(list) {
    while (bits_ < kMaxPartitionBits && (kPartitionSize << bits_) < list.size) ++bits_;
    const std::int64_t num_parts =
        std::clamp<std::int64_t>(list.size / kMinPartSize, 1, num_threads());
    std::int64_t chunks = 0;
    for (std::int64_t part = 0; part < num_parts; ++part) {
      const std::int64_t begin = list.size * part / num_parts;
      const std::int64_t end = list.size * (part + 1) / num_parts;
      parts_.emplace_back(begin, end, bits_, static_cast<std::uint32_t>(chunks));
      chunks += PairPart::chunks_for(end - begin, bits_);
    }
    allocate(chunks);
    if (list.tables) {
      find<true>();
    } else {
      find<false>();
    }
  }

  std::int64_t size() const { return part_first_.back(); }

  void write(std::int64_t* unique_index, std::int32_t* inverse, std::int64_t* counts) {
    prefer_huge_pages(unique_index, static_cast<std::size_t>(size()) * sizeof(*unique_index));
    prefer_huge_pages(counts, static_cast<std::size_t>(size()) * sizeof(*counts));
    prefer_huge_pages(inverse, static_cast<std::size_t>(list_.size) * sizeof(*inverse));
    const Results results = {unique_index, inverse, counts};
    parallel_tasks(num_parts(), [&](std::int64_t part) { number(part, results); });
    // A few tasks for each part but the first, so that all threads have one.
    const std::int64_t pieces = num_parts();
    parallel_tasks((num_parts() - 1) * pieces, [&](std::int64_t task) {
      const PairPart& part = parts_[task / pieces + 1];
      const std::int64_t piece = task % pieces;
      const std::int64_t num_blocks = (part.end() - part.begin() + kBlock - 1) / kBlock;
      finish(part.begin() + num_blocks * piece / pieces * kBlock,
             std::min(part.end(), part.begin() + num_blocks * (piece + 1) / pieces * kBlock),
             inverse);
    });
  }

 private:
  std::int64_t num_parts() const { return static_cast<std::int64_t>(parts_.size()); }
  std::int64_t num_partitions() const { return std::int64_t{1} << bits_; }

  void allocate(std::int64_t chunks) {
    const std::int64_t entries = chunks * kChunk;
    const std::int64_t ids = list_.size + num_parts() * kSpareIds;
    scratch_.emplace(
        Scratch::bytes_for<std::uint64_t>(entries) + 2 * Scratch::bytes_for<std::int32_t>(entries) +
        Scratch::bytes_for<std::uint32_t>(chunks) + Scratch::bytes_for<std::uint16_t>(list_.size) +
        Scratch::bytes_for<std::int32_t>(ids));
    entries_.hashes = scratch_->take<std::uint64_t>(entries);
    entries_.ids = scratch_->take<std::int32_t>(entries);
    entries_.tables = list_.tables ? scratch_->take<std::int32_t>(entries) : nullptr;
    entries_.next_chunk = scratch_->take<std::uint32_t>(chunks);
    entries_.partition_at = scratch_->take<std::uint16_t>(list_.size);
    of_id_ = scratch_->take<std::int32_t>(ids);
  }

  template <bool kTables>
  void find() {
    parallel_tasks(num_parts(),
                   [&](std::int64_t part) { parts_[part].deal<kTables>(list_, entries_); });
    first_id_.assign(static_cast<std::size_t>(num_partitions() * (num_parts() + 1)), 0);
    std::int64_t id = 0;
    for (std::int64_t partition = 0; partition < num_partitions(); ++partition) {
      first_id_[partition * (num_parts() + 1)] = static_cast<std::int32_t>(id);
      for (const PairPart& part : parts_) id += part.size(partition);
    }
    std::atomic<std::int64_t> next{0};
    parallel_tasks(std::min<std::int64_t>(num_threads(), num_partitions()), [&](std::int64_t) {
      PairTable<kTables> table;
      for (;;) {
        const std::int64_t partition = next.fetch_add(1, std::memory_order_relaxed);
        if (partition >= num_partitions()) return;
        find_in(partition, &table);
      }
    });
    part_first_.assign(static_cast<std::size_t>(num_parts() + 1), 0);
    for (std::int64_t part = 0; part < num_parts(); ++part) {
      std::int64_t& end = part_first_[part + 1];
      end = part_first_[part];
      for (std::int64_t partition = 0; partition < num_partitions(); ++partition) {
        end += first_id(partition, part + 1) - first_id(partition, part);
      }
    }
  }

  // The id of the first pair that first appears in a part; ids of a partition follow each other.
  std::int32_t& first_id(std::int64_t partition, std::int64_t part) {
    return first_id_[partition * (num_parts() + 1) + part];
  }

  template <bool kTables>
  void find_in(std::int64_t partition, PairTable<kTables>* table) {
    const std::int32_t base = first_id(partition, 0);
    std::int64_t size = 0;
    for (const PairPart& part : parts_) size += part.size(partition);
    table->clear(size);
    for (std::int64_t which = 0; which < num_parts(); ++which) {
      const PairPart& part = parts_[which];
      part.for_chunks(entries_, partition, [&](std::uint32_t begin, std::uint32_t end) {
        table->insert(entries_, begin, end, base);
      });
      part.for_repeats(partition, [&](std::uint32_t entry, std::uint32_t times) {
        table->add(entries_, entry, times);
      });
      first_id(partition, which + 1) = base + static_cast<std::int32_t>(table->size());
    }
    table->copy_counts(of_id_ + base);
  }

  struct Place {
    std::uint32_t entry;
    std::int32_t first_id;
  };

  struct Results {
    std::int64_t* unique_index;
    std::int32_t* inverse;
    std::int64_t* counts;
  };

  // Counts of the pairs that first appear here are read from of_id_, and numbers take their place.
  void number(std::int64_t which, const Results& results) {
    const PairPart& part = parts_[which];
    std::vector<Place> places(static_cast<std::size_t>(num_partitions()));
    for (std::int64_t partition = 0; partition < num_partitions(); ++partition) {
      places[partition] = {part.first_entry(partition), first_id(partition, which)};
    }
    const auto spare = static_cast<std::int32_t>(list_.size + which * kSpareIds);
    std::int64_t next = part_first_[which];
    const std::int64_t last = part_first_[which + 1];
    std::int64_t repeated = 0;  // Where a block that repeats finds what.
    for (std::int64_t block = part.begin(); block < part.end(); block += kBlock) {
      const std::int64_t end = std::min(part.end(), block + kBlock);
      if (entries_.partition_at[block] == kRepeats) {
        // In later parts the last step fills the block from its first position.
        std::fill(results.inverse + block, results.inverse + (which == 0 ? end : block + 1),
                  results.inverse[repeated]);
        repeated = block;
        continue;
      }
      repeated = end - 1;
      if (last - next >= end - block) {
        next = which == 0
                   ? number_block<true, false>(block, end, next, spare, places.data(), results)
                   : number_block<true, true>(block, end, next, spare, places.data(), results);
      } else {
        next = number_block<false, true>(block, end, next, spare, places.data(), results);
      }
    }
  }

  // Blocks from `begin` on of a part that is not the first: ids that were left become numbers.
  void finish(std::int64_t begin, std::int64_t end, std::int32_t* inverse) const {
    const std::int32_t* const numbers = of_id_;
    const auto number_of = [numbers](std::int32_t value) {
      const std::int32_t left = value >> 31;  // -1 or 0.
      return (value & ~left) | (numbers[~value & left] & left);
    };
    for (std::int64_t block = begin; block < end; block += kBlock) {
      const std::int64_t block_end = std::min(end, block + kBlock);
      if (entries_.partition_at[block] == kRepeats) {
        std::fill(inverse + block, inverse + block_end, number_of(inverse[block]));
        continue;
      }
      for (std::int64_t at = block; at < block_end; ++at) inverse[at] = number_of(inverse[at]);
    }
  }

  // Returns the next number. `kLater`: pairs may have appeared in earlier parts. With `kRoom` every
  // position writes a result and only new pairs count it, so that there is no branch to guess; for
  // that, results of the next part must not be near.
  template <bool kRoom, bool kLater>
  std::int64_t number_block(std::int64_t begin, std::int64_t end, std::int64_t next,
                            std::int32_t spare, Place* places, const Results results) {
    const PairEntries entries = entries_;
    std::int32_t* const of_id = of_id_;
    for (std::int64_t at = begin; at < end; ++at) {
      Place& place = places[entries.partition_at[at]];
      const std::uint32_t entry = place.entry++;
      if (__builtin_expect(place.entry % kChunk == 0, 0)) {
        place.entry = entries.next_chunk[entry / kChunk];
        prefetch_chunk(entries.ids + place.entry);
      }
      const std::int32_t value = entries.ids[entry], fresh = value >> 31;  // -1 or 0.
      const std::int32_t id = value ^ fresh;
      const std::int32_t left = kLater ? (id - place.first_id) >> 31 : 0;
      const std::int32_t count_or_number = of_id[id ^ ((id ^ spare) & left)];
      if (kRoom || fresh) {
        results.unique_index[next] = at;
        results.counts[next] = count_or_number;
      }
      of_id[spare ^ ((id ^ spare) & fresh)] = static_cast<std::int32_t>(next);
      const std::int32_t number =
          (static_cast<std::int32_t>(next) & fresh) | (count_or_number & ~fresh);
      results.inverse[at] = (number & ~left) | (~id & left);
      next -= fresh;
    }
    return next;
  }

  const KeyList list_;
  int bits_ = 0;
  std::vector<PairPart> parts_;
  std::optional<Scratch> scratch_;
  PairEntries entries_;
  std::int32_t* of_id_ = nullptr;
  std::vector<std::int32_t> first_id_;
  std::vector<std::int64_t> part_first_;  // [num_parts + 1]: the number of a part's first pair.
};

Dedup::Dedup(const KeyList& input) : steps_(new Steps(input)) {}
Dedup::~Dedup() = default;
std::int64_t Dedup::size() const { return steps_->size(); }
void Dedup::write(std::int64_t* unique_index, std::int32_t* inverse, std::int64_t* counts) {
  steps_->write(unique_index, inverse, counts);
}

}  // namespace nestpipe
