// Four passes: count the hash's top bits per part of the list; scatter pairs and positions into
// partitions (stable, so ascending); dedup each partition, noting for every position where its pair
// first appears; number the first appearances in order.
#include "dedup_radix.h"

#include <memory>
#include <vector>

#include "nestpipe/parallel.h"
#include "pair_set.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kPartitionSize = std::int64_t{1} << 15;
constexpr int kMaxPartitionBits = 12;
constexpr std::int64_t kMinPartSize = 65536;

template <typename T>
std::unique_ptr<T[]> uninitialized(std::int64_t size) {
  return std::unique_ptr<T[]>(new T[static_cast<std::size_t>(size)]);
}

template <bool kTables>
class RadixDedup {
 public:
  explicit RadixDedup(const KeyList& input) : input_(input) {
    while (bits_ < kMaxPartitionBits && (kPartitionSize << bits_) < input.size) ++bits_;
    num_parts_ = input.size / kMinPartSize;
    if (num_parts_ > num_threads()) num_parts_ = num_threads();
    if (num_parts_ < 1) num_parts_ = 1;
  }

  std::int64_t run(std::int64_t* unique_index, std::int32_t* inverse, std::int64_t* counts) {
    scatter();
    count_at_ = uninitialized<std::uint32_t>(input_.size);
    parallel_tasks(num_partitions(),
                   [&](std::int64_t partition) { dedup_partition(partition, inverse); });
    return number(unique_index, inverse, counts);
  }

 private:
  std::int64_t num_partitions() const { return std::int64_t{1} << bits_; }
  std::int64_t begin_of(std::int64_t part) const { return input_.size * part / num_parts_; }
  std::int64_t partition_of(std::int64_t at) const {
    const std::int32_t table = kTables ? input_.tables[at] : 0;
    return static_cast<std::int64_t>(hash_pair(input_.keys[at], table) >> (64 - bits_));
  }

  void scatter() {
    keys_ = uninitialized<std::int64_t>(input_.size);
    if (kTables) tables_ = uninitialized<std::int32_t>(input_.size);
    positions_ = uninitialized<std::uint32_t>(input_.size);
    std::vector<std::int64_t> next(static_cast<std::size_t>(num_parts_ * num_partitions()), 0);
    parallel_tasks(num_parts_, [&](std::int64_t part) {
      std::int64_t* histogram = next.data() + part * num_partitions();
      for (std::int64_t at = begin_of(part); at < begin_of(part + 1); ++at) {
        ++histogram[partition_of(at)];
      }
    });
    partition_begin_.push_back(0);
    std::int64_t offset = 0;
    for (std::int64_t partition = 0; partition < num_partitions(); ++partition) {
      for (std::int64_t part = 0; part < num_parts_; ++part) {
        std::int64_t& entry = next[part * num_partitions() + partition];
        const std::int64_t in_part = entry;
        entry = offset;
        offset += in_part;
      }
      partition_begin_.push_back(offset);
    }
    parallel_tasks(num_parts_, [&](std::int64_t part) {
      std::int64_t* place = next.data() + part * num_partitions();
      for (std::int64_t at = begin_of(part); at < begin_of(part + 1); ++at) {
        const std::int64_t to = place[partition_of(at)]++;
        keys_[to] = input_.keys[at];
        if (kTables) tables_[to] = input_.tables[at];
        positions_[to] = static_cast<std::uint32_t>(at);
      }
    });
  }

  // Leaves in first[position] where the position's pair first appears, and in count_at_[that] how
  // often.
  void dedup_partition(std::int64_t partition, std::int32_t* first) {
    const std::int64_t begin = partition_begin_[partition];
    const std::int64_t size = partition_begin_[partition + 1] - begin;
    PairSet<kTables> set(size);
    const auto numbers = uninitialized<std::int32_t>(size);
    set.insert({keys_.get() + begin, kTables ? tables_.get() + begin : nullptr, size},
               {positions_.get() + begin, nullptr, 0}, numbers.get());
    for (std::int64_t i = 0; i < size; ++i) {
      first[positions_[begin + i]] = static_cast<std::int32_t>(set.positions()[numbers[i]]);
    }
    for (std::int64_t pair = 0; pair < set.size(); ++pair) {
      count_at_[set.positions()[pair]] = set.counts()[pair];
    }
  }

  // Turns first appearances into numbers, in order; returns how many there are.
  std::int64_t number(std::int64_t* unique_index, std::int32_t* inverse, std::int64_t* counts) {
    std::vector<std::int64_t> part_first(static_cast<std::size_t>(num_parts_ + 1), 0);
    parallel_tasks(num_parts_, [&](std::int64_t part) {
      std::int64_t firsts = 0;
      for (std::int64_t at = begin_of(part); at < begin_of(part + 1); ++at) {
        firsts += inverse[at] == at;
      }
      part_first[part + 1] = firsts;
    });
    for (std::int64_t part = 0; part < num_parts_; ++part) part_first[part + 1] += part_first[part];

    // The scattered positions are no longer needed: their array holds the numbers, by position of
    // first appearance.
    std::uint32_t* number_at = positions_.get();
    parallel_tasks(num_parts_, [&](std::int64_t part) {
      std::int64_t next = part_first[part];
      for (std::int64_t at = begin_of(part); at < begin_of(part + 1); ++at) {
        if (inverse[at] != at) continue;
        unique_index[next] = at;
        counts[next] = count_at_[at];
        number_at[at] = static_cast<std::uint32_t>(next++);
      }
    });
    parallel_tasks(num_parts_, [&](std::int64_t part) {
      for (std::int64_t at = begin_of(part); at < begin_of(part + 1); ++at) {
        inverse[at] = static_cast<std::int32_t>(number_at[inverse[at]]);
      }
    });
    return part_first[num_parts_];
  }

  const KeyList input_;
  int bits_ = 1;
  std::int64_t num_parts_ = 1;
  std::vector<std::int64_t> partition_begin_;  // [num_partitions + 1]
  // By partition, then position.
  std::unique_ptr<std::int64_t[]> keys_;
  std::unique_ptr<std::int32_t[]> tables_;
  std::unique_ptr<std::uint32_t[]> positions_;
  std::unique_ptr<std::uint32_t[]> count_at_;  // by position of first appearance
};

}  // namespace

std::int64_t dedup_radix(const KeyList& input, std::int64_t* unique_index, std::int32_t* inverse,
                         std::int64_t* counts) {
  return input.tables ? RadixDedup<true>(input).run(unique_index, inverse, counts)
                      : RadixDedup<false>(input).run(unique_index, inverse, counts);
}

}  // namespace nestpipe
