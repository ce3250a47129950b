// What a C++ program would do without this package: absl::flat_hash_map from a key to the number of
// a row, and memcpy of the rows. With `tuned`, lines are requested a block of keys ahead, and table
// and rows lie on huge pages. Built by absl_peer.py; not a part of the package.
//
// With several threads each owns a map, its rows and the keys whose hash says so: it passes over
// all keys of a call and handles its own, so that no locks are needed.
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace {

constexpr int kBlock = 32;  // Keys whose lines are requested before the first of them is used.

void* pages(std::size_t bytes, bool huge) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  if (huge) madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

// Large arrays on huge pages, others as usual.
template <typename T>
struct HugePages {
  using value_type = T;
  static constexpr std::size_t kFrom = std::size_t{2} << 20;
  HugePages() = default;
  template <typename U>
  HugePages(const HugePages<U>&) {}  // NOLINT: what allocators are rebound by.
  T* allocate(std::size_t count) {
    if (count * sizeof(T) < kFrom) return std::allocator<T>().allocate(count);
    return static_cast<T*>(pages(count * sizeof(T), true));
  }
  void deallocate(T* data, std::size_t count) {
    if (count * sizeof(T) < kFrom) return std::allocator<T>().deallocate(data, count);
    munmap(data, count * sizeof(T));
  }
  template <typename U>
  bool operator==(const HugePages<U>&) const {
    return true;
  }
  template <typename U>
  bool operator!=(const HugePages<U>&) const {
    return false;
  }
};

using Entry = std::pair<const std::int64_t, std::uint32_t>;
using Hash = absl::container_internal::hash_default_hash<std::int64_t>;
using Plain = absl::flat_hash_map<std::int64_t, std::uint32_t>;
using Tuned = absl::flat_hash_map<std::int64_t, std::uint32_t, Hash, std::equal_to<std::int64_t>,
                                  HugePages<Entry>>;

struct Call {
  const std::int64_t* keys;
  std::int64_t size;
  const float* values;   // [size, dim] of new keys, or null: `initial` everywhere.
  float* out;            // [size, dim], or null.
  std::uint8_t* status;  // [size], 1: new; or null.
};

class Peer {
 public:
  virtual ~Peer() = default;
  virtual void find_or_insert(const Call& call) = 0;
  virtual void erase(const std::int64_t* keys, std::int64_t size) = 0;
  virtual std::int64_t bytes() const = 0;
};

template <typename Map, bool kTuned>
class MapAndRows : public Peer {
 public:
  MapAndRows(std::int64_t dim, std::int64_t max_rows, int threads, float initial)
      : dim_(dim), initial_(initial), parts_(threads) {
    for (Part& part : parts_) {
      part.bytes = static_cast<std::size_t>(max_rows * dim) * sizeof(float);
      part.rows = static_cast<float*>(pages(part.bytes, kTuned));
    }
  }
  ~MapAndRows() override {
    for (Part& part : parts_) munmap(part.rows, part.bytes);
  }

  void find_or_insert(const Call& call) override {
    each_part([&](int number) { kTuned ? ahead(call, number) : one_by_one(call, number); });
  }

  void erase(const std::int64_t* keys, std::int64_t size) override {
    each_part([&](int number) {
      Part& part = parts_[number];
      for (std::int64_t j = 0; j < size; ++j) {
        if (part_of(keys[j]) != number) continue;
        const auto found = part.map.find(keys[j]);
        if (found == part.map.end()) continue;
        part.free_rows.push_back(found->second);
        part.map.erase(found);
      }
    });
  }

  std::int64_t bytes() const override {
    std::int64_t sum = 0;
    for (const Part& part : parts_) {
      sum += static_cast<std::int64_t>(part.map.capacity() * (sizeof(Entry) + 1));
    }
    return sum;
  }

 private:
  struct Part {
    Map map;
    float* rows = nullptr;
    std::size_t bytes = 0;
    std::uint32_t num_rows = 0;
    std::vector<std::uint32_t> free_rows;
  };

  int part_of(std::int64_t key) const {
    const std::uint64_t mixed = static_cast<std::uint64_t>(key) * 0x9E3779B97F4A7C15ull;
    return static_cast<int>((mixed >> 32) * parts_.size() >> 32);
  }

  template <typename Work>
  void each_part(const Work& work) {
    std::vector<std::thread> helpers;
    for (std::size_t i = 1; i < parts_.size(); ++i) helpers.emplace_back(work, static_cast<int>(i));
    work(0);
    for (std::thread& helper : helpers) helper.join();
  }

  // The key's row, which is made if there is none.
  float* row(const Call& call, Part* part, std::int64_t j) {
    const auto [entry, is_new] = part->map.try_emplace(call.keys[j], 0);
    if (call.status != nullptr) call.status[j] = is_new;
    if (is_new) {
      if (part->free_rows.empty()) {
        entry->second = part->num_rows++;
      } else {
        entry->second = part->free_rows.back();
        part->free_rows.pop_back();
      }
    }
    float* const found = part->rows + std::int64_t{entry->second} * dim_;
    if (!is_new) return found;
    for (std::int64_t d = 0; d < dim_; ++d) {
      found[d] = call.values == nullptr ? initial_ : call.values[j * dim_ + d];
    }
    return found;
  }

  void copy(const Call& call, std::int64_t j, const float* from) const {
    if (call.out == nullptr) return;
    std::memcpy(call.out + j * dim_, from, static_cast<std::size_t>(dim_) * sizeof(float));
  }

  void one_by_one(const Call& call, int number) {
    for (std::int64_t j = 0; j < call.size; ++j) {
      if (parts_.size() > 1 && part_of(call.keys[j]) != number) continue;
      copy(call, j, row(call, &parts_[number], j));
    }
  }

  void ahead(const Call& call, int number) {
    Part& part = parts_[number];
    std::int64_t mine[kBlock];
    const float* rows[kBlock];
    for (std::int64_t j = 0; j < call.size;) {
      int count = 0;
      for (; count < kBlock && j < call.size; ++j) {
        mine[count] = j;
        count += parts_.size() == 1 || part_of(call.keys[j]) == number;
      }
      for (int i = 0; i < count; ++i) part.map.prefetch(call.keys[mine[i]]);
      for (int i = 0; i < count; ++i) {
        rows[i] = row(call, &part, mine[i]);
        for (std::int64_t d = 0; d < dim_; d += 16) __builtin_prefetch(rows[i] + d);
      }
      for (int i = 0; i < count; ++i) copy(call, mine[i], rows[i]);
    }
  }

  const std::int64_t dim_;
  const float initial_;
  std::vector<Part> parts_;
};

}  // namespace

extern "C" {

void* peer_new(std::int64_t dim, std::int64_t max_rows, int threads, int tuned, float initial) {
  if (tuned != 0) return new MapAndRows<Tuned, true>(dim, max_rows, threads, initial);
  return new MapAndRows<Plain, false>(dim, max_rows, threads, initial);
}

void peer_delete(void* peer) { delete static_cast<Peer*>(peer); }

void peer_find_or_insert(void* peer, const std::int64_t* keys, std::int64_t size,
                         const float* values, float* out, std::uint8_t* status) {
  static_cast<Peer*>(peer)->find_or_insert({keys, size, values, out, status});
}

void peer_erase(void* peer, const std::int64_t* keys, std::int64_t size) {
  static_cast<Peer*>(peer)->erase(keys, size);
}

std::int64_t peer_index_bytes(void* peer) { return static_cast<Peer*>(peer)->bytes(); }
}
