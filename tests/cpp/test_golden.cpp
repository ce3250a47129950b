// The bits of row arithmetic, as digests that must be the same on every processor: pooling and its
// way back, every update rule, wire formats. A digest changes only with the definition of a result.
#include <cstdint>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "check.h"
#include "nestpipe/hash.h"
#include "nestpipe/lookup_pool.h"
#include "nestpipe/parallel.h"
#include "nestpipe/row_storage.h"
#include "nestpipe/row_update.h"
#include "nestpipe/wire_rows.h"

namespace {

using namespace nestpipe;

// In [-1, 1), by integers alone.
std::vector<float> values(std::int64_t size, std::uint64_t seed) {
  std::vector<float> made(size);
  for (std::int64_t i = 0; i < size; ++i) {
    const std::uint64_t word = mix64(seed * 1000003 + static_cast<std::uint64_t>(i));
    made[i] = (static_cast<float>(word >> 40) - 8388608.0f) / 8388608.0f;
  }
  return made;
}

class Digest {
 public:
  template <typename T>
  void add(const std::vector<T>& data) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(data.data());
    for (std::size_t i = 0; i < data.size() * sizeof(T); ++i) {
      value_ = (value_ ^ bytes[i]) * 0x100000001B3ull;
    }
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xCBF29CE484222325ull;
};

void check_digest(const std::string& what, const Digest& digest, std::uint64_t expected) {
  if (digest.value() == expected) return;
  std::cerr << what << ": 0x" << std::hex << digest.value() << std::dec << "\n";
  ++failures();
}

constexpr std::int64_t kDims[] = {1, 7, 8, 19, 64, 129};

void test_pooling(std::uint64_t expected) {
  constexpr std::int64_t kRows = 200;
  constexpr std::int64_t kBags = 400;
  Digest digest;
  for (const std::int64_t dim : kDims) {
    const std::vector<float> rows = values(kRows * dim, 1);
    const std::vector<float> grads = values(kBags * dim, 2);
    std::vector<std::int32_t> slots;
    std::vector<std::int64_t> offsets = {0};
    for (std::int64_t bag = 0; bag < kBags; ++bag) {
      const std::int64_t length = bag < 300 ? bag % 23 : 1;
      for (std::int64_t j = 0; j < length; ++j) {
        const auto draw = mix64(static_cast<std::uint64_t>(bag * 100 + j)) % 300;
        slots.push_back(draw < 80 ? 7 : draw < 90 ? -1 : static_cast<std::int32_t>(draw % kRows));
      }
      offsets.push_back(static_cast<std::int64_t>(slots.size()));
    }
    BagList bags;
    bags.slots = slots.data();
    bags.num_occurrences = static_cast<std::int64_t>(slots.size());
    bags.bag_offsets = offsets.data();
    bags.num_bags = kBags;
    bags.segment_bags = {0, 100, 200, 300, kBags};
    bags.segment_modes = {0, 1, 2, 3};
    const RowMatrix matrix = {rows.data(), kRows, dim, dim};
    std::vector<float> out(kBags * dim);
    std::vector<float> sums(kRows * dim);
    std::vector<SegmentOutput> outs;
    std::vector<SegmentGradient> gradients;
    for (int s = 0; s < 4; ++s) {
      outs.push_back({out.data() + bags.segment_bags[s] * dim, dim});
      gradients.push_back({grads.data() + bags.segment_bags[s] * dim, dim});
    }
    lookup_pool_forward(matrix, bags, outs);
    lookup_pool_backward(matrix, bags, gradients, sums.data());
    digest.add(out);
    digest.add(sums);
  }
  check_digest("pooling", digest, expected);
}

void test_updates(const std::vector<std::uint64_t>& expected) {
  constexpr std::int64_t kRows = 40;
  for (std::int32_t code = 0; code <= static_cast<std::int32_t>(UpdateRule::kLamb); ++code) {
    Digest digest;
    for (const std::int64_t dim : kDims) {
      for (const double decay : {0.0, 0.25}) {
        UpdateSettings s;
        s.rule = static_cast<UpdateRule>(code);
        s.weight_decay = decay;
        s.eps = 1e-8;
        s.beta1 = 0.9;
        s.beta2 = 0.999;
        s.beta = 1.0;
        s.l1 = 0.01;
        const std::int64_t row_floats = dim + state_floats(s, dim) + 1;
        std::vector<float> rows(kRows * row_floats, 0.0f);
        for (s.step = 1; s.step <= 3; ++s.step) {
          const std::vector<float> grads = values(kRows * dim, 3 + s.step);
          UpdateArguments a;
          a.rows = rows.data();
          a.num_rows = kRows;
          a.row_floats = row_floats;
          a.dim = dim;
          a.grads = grads.data();
          a.grad_stride = dim;
          a.lr = 0.1f;
          row_update(a, s);
        }
        digest.add(rows);
      }
    }
    check_digest("update rule " + std::to_string(code), digest, expected[code]);
  }
}

void test_wire(const std::vector<std::uint64_t>& expected) {
  constexpr std::int64_t kRows = 50;
  for (std::int32_t code = 0; code < 4; ++code) {
    const auto format = static_cast<WireFormat>(code);
    Digest digest;
    for (const std::int64_t dim : kDims) {
      std::vector<float> rows = values(kRows * dim, 9);
      for (std::int64_t i = 0; i < kRows * dim; i += 5) rows[i] *= 1e-5f;  // Small in float16.
      std::vector<std::uint8_t> message(wire_row_bytes(format, dim) * kRows);
      std::vector<float> back(kRows * dim);
      encode_rows(format, rows.data(), kRows, dim, dim, message.data());
      decode_rows(format, message.data(), kRows, dim, back.data());
      digest.add(message);
      digest.add(back);
    }
    check_digest("wire format " + std::to_string(code), digest, expected[code]);
  }
}

}  // namespace

int main() {
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    test_pooling(0xfb256004951f47e9);
    test_updates({0x41d9eebb9afbde23, 0x2e3b91d78a9344d3, 0xef89c9685fe79674, 0x570c34cc278d11cf,
                  0x3fadcc009d8ad43f, 0x4f0bfe9e914ee6bc, 0xda84c2e20226b099, 0xa6c07cb980ddc501});
    test_wire({0x8d4d59bad2bb6c85, 0xda9cac39001bdbfd, 0x77af8492cc2ec5d3, 0x3018cd77a9cda729});
  }
  return nestpipe::failures() == 0 ? 0 : 1;
}
