// Keys without a row on their way into the index: collected, entered with provisional numbers,
// settled with their rows or withdrawn.
#include <algorithm>
#include <stdexcept>

#include "missing.h"
#include "nestpipe/parallel.h"
#include "nestpipe/request_line.h"
#include "nestpipe/store.h"

namespace nestpipe {
namespace {

constexpr std::int64_t kKeysPerTask = 2048;

}  // namespace

// Those of the call whose handle is negative, in input order.
void EmbeddingStore::collect_missing(const std::int64_t* handles, Missing* missing) {
  const KeySpan& in = missing->in;
  const std::int64_t parts =
      std::max<std::int64_t>(1, std::min<std::int64_t>(num_threads(), in.size / kKeysPerTask));
  std::vector<std::int64_t> ends(static_cast<std::size_t>(parts) + 1, 0);
  const auto begin_of = [&](std::int64_t part) { return in.size * part / parts; };
  parallel_tasks(parts, [&](std::int64_t part) {
    std::int64_t count = 0;
    for (std::int64_t j = begin_of(part); j < begin_of(part + 1); ++j) count += handles[j] < 0;
    ends[part + 1] = count;
  });
  for (std::int64_t part = 0; part < parts; ++part) ends[part + 1] += ends[part];
  if (ends[parts] >= std::int64_t{kNoRow}) {
    throw std::length_error("store: too many keys in a call");
  }
  missing->num_missing = static_cast<std::uint32_t>(ends[parts]);
  if (missing->num_missing == 0) return;
  missing->positions = Scratch<std::int64_t>(ends[parts]);
  missing->hashes = Scratch<std::uint64_t>(ends[parts]);
  parallel_tasks(parts, [&](std::int64_t part) {
    std::int64_t at = ends[part];
    for (std::int64_t j = begin_of(part); at < ends[part + 1]; ++j) {
      if (handles[j] >= 0) continue;
      missing->positions[at] = j;
      missing->hashes[at] = tables_[in.tables[j]]->index.hash(in.keys[j]);
      ++at;
    }
  });
}

// With provisional numbers, or with those that keys get if none is repeated.
void EmbeddingStore::enter(Missing* missing) {
  const std::uint32_t count = missing->count();
  if (count == 0) return;
  missing->first = Scratch<std::uint32_t>(count);
  missing->rows = Scratch<std::uint32_t>(count);
  missing->grown.assign(kNumShards, 0);
  missing->entries = Scratch<Missing::Entry>(count);
  if (missing->numbered) expect_rows(missing);
  const bool numbered = missing->numbered;
  Missing::Entry* const entries = missing->entries.get();
  missing->by_shard.assign(
      count, [&](std::uint32_t i) { return missing->hashes[i]; },
      [&](std::int64_t at, std::uint32_t i) {
        missing->first[i] = i;
        if (!numbered) missing->rows[i] = kNoRow;
        entries[at] = {missing->key(i), i, missing->table(i), nullptr};
      });
  missing->by_shard.for_each_place(
      [&](std::int64_t at) {
        const KeyIndex& index = tables_[entries[at].table]->index;
        index.prefetch(index.hash(entries[at].key));
        if (numbered) request_line(&missing->rows[entries[at].number]);
      },
      [&](std::int64_t at) {
        Missing::Entry& entry = entries[at];
        KeyIndex& index = tables_[entry.table]->index;
        const std::uint64_t hash = index.hash(entry.key);
        const void* const before = index.shard_data(hash);
        const KeyIndex::Inserted inserted =
            index.enter(hash, entry.key, numbered ? missing->rows[entry.number] : entry.number);
        entry.row = inserted.row;
        if (inserted.found != kNoRow) {
          missing->first[entry.number] =
              numbered ? number_of_entered(*missing, inserted.found) : inserted.found;
          missing->repeats.store(true, std::memory_order_relaxed);
        }
        if (index.shard_data(hash) != before) missing->grown[shard_of(hash)] = 1;
      });
}

void EmbeddingStore::settle(const Missing& missing) {
  if (missing.count() == 0 || missing.numbered) return;
  const Missing::Entry* const entries = missing.entries.get();
  missing.by_shard.for_each_place(
      [&](std::int64_t at) {
        request_line(&missing.rows[entries[at].number]);
        if (entries[at].row != nullptr) request_line_to_write(entries[at].row);
      },
      [&](std::int64_t at) {
        const Missing::Entry& entry = entries[at];
        if (entry.row == nullptr || missing.rows[entry.number] == kNoRow) return;
        KeyIndex& index = tables_[entry.table]->index;
        if (missing.grown[shard_of(missing.hashes[entry.number])] != 0) {
          index.assign(missing.hashes[entry.number], entry.key, missing.rows[entry.number]);
        } else {
          *entry.row = missing.rows[entry.number];
        }
      });
  if (missing.all_have_rows) return;
  missing.by_shard.for_each([](std::uint32_t) {},
                            [&](std::uint32_t i) {
                              if (missing.first[i] != i || missing.rows[i] != kNoRow) return;
                              tables_[missing.table(i)]->index.erase(missing.hashes[i],
                                                                     missing.key(i));
                            });
}

// Before the call the index had none of them.
void EmbeddingStore::withdraw(const Missing& missing) {
  for (std::uint32_t i = 0; i < missing.count(); ++i) {
    tables_[missing.table(i)]->index.erase(missing.hashes[i], missing.key(i));
  }
}

}  // namespace nestpipe
