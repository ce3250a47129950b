// Intersect in device memory: the pairs of `a` are entered into a table (pair_chains.cuh), `b` is
// looked up in it, and hits are listed in order by an exclusive sum.
//
// Floor, bytes: a key of `a` 8 and a slot's sector of 32; of `b` 24, a sector, and 16 where it
// hits.
#include "../cuda/scan.cuh"
#include "nestpipe/cuda/intersect.h"
#include "pair_chains.cuh"

namespace nestpipe {
namespace cuda {
namespace {

struct IntersectWork {
  PairChains chains;
  std::int32_t* match;   // [b.size], positions of `a` or -1
  std::int32_t* places;  // [b.size], in the result
  std::int32_t* scan_work;
};

IntersectWork lay_out_intersect(Carve& carve, std::int64_t size_a, std::int64_t size_b) {
  IntersectWork work{};
  work.chains = take_chains(carve, size_a);
  work.match = carve.take<std::int32_t>(size_b);
  work.places = carve.take<std::int32_t>(size_b);
  work.scan_work = carve.take<std::int32_t>(scan_work_items(size_b));
  return work;
}

__global__ void clear_intersect(PairChains chains, std::int64_t size) {
  clear_chains(chains, global_thread(), size);
}

__global__ void enter(KeyList a, PairChains chains) {
  const std::int64_t i = global_thread();
  const unsigned active = __ballot_sync(kAllLanes, i < a.size);
  if (i < a.size) enter_pair(a, chains, i, active);
}

__global__ void look_up(KeyList a, KeyList b, IntersectWork work) {
  const std::int64_t i = global_thread();
  if (i >= b.size) return;
  const int match = first_position(a, work.chains, b.keys[i], table_at(b, i));
  work.match[i] = match;
  work.places[i] = match >= 0 ? 1 : 0;
}

__global__ void list_hits(IntersectWork work, std::int64_t size, IntersectOutput output) {
  const std::int64_t i = global_thread();
  if (i >= size || work.match[i] < 0) return;
  output.index_a[work.places[i]] = work.match[i];
  output.index_b[work.places[i]] = i;
}

}  // namespace

std::size_t intersect_work_bytes(std::int64_t size_a, std::int64_t size_b) {
  Carve carve(nullptr);
  lay_out_intersect(carve, size_a, size_b);
  return carve.used();
}

void intersect(const KeyList& a, const KeyList& b, void* work_memory, const IntersectOutput& output,
               Stream stream) {
  Carve carve(work_memory);
  const IntersectWork work = lay_out_intersect(carve, a.size, b.size);
  const dim3 threads(kThreads);
  launch(clear_intersect, num_blocks(work.chains.num_slots, kThreads), threads, 0, stream,
         work.chains, a.size);
  if (a.size > 0) {
    launch(enter, num_blocks(a.size, kThreads), threads, 0, stream, a, work.chains);
  }
  if (b.size > 0) {
    launch(look_up, num_blocks(b.size, kThreads), threads, 0, stream, a, b, work);
  }
  exclusive_sum(work.places, b.size, work.scan_work, output.num_matches, stream);
  if (b.size > 0) {
    launch(list_hits, num_blocks(b.size, kThreads), threads, 0, stream, work, b.size, output);
  }
}

}  // namespace cuda
}  // namespace nestpipe
