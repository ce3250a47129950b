// A file that holds rows of which only some are in memory: slabs are shared mappings of it.
//
// The file has no name, so nothing is left behind however the process ends. Its disk space is
// allocated before rows are numbered: a full disk is an error then, and never later.
//
// The file keeps account of which of its pages are in memory. `use` names pages that are about to
// be touched: those that are out are asked for, all at once and without waiting, and those that
// have not been used for the longest time go instead, written first if they changed. Nothing here
// copies or changes a row. Whether a page is in memory decides about time alone: the system brings
// any page that is touched, and keeps what has changed until it is written. So all calls may run
// beside any use of the rows, and no order of them changes a result.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "nestpipe/memory.h"

namespace nestpipe {

// An error of the file system; code is its errno.
class FileError : public std::runtime_error {
 public:
  FileError(int code, const std::string& message) : std::runtime_error(message), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

struct RowFileCounters {
  std::uint64_t file_bytes;      // Disk space allocated.
  std::uint64_t resident_pages;  // In memory, as far as the account goes.
  std::uint64_t limit_pages;
  std::uint64_t page_bytes;
  std::uint64_t read_pages;     // Asked for since the file was made,
  std::uint64_t written_pages;  // written to make room,
  std::uint64_t dropped_pages;  // gone from memory.
};

class RowFile {
 public:
  // Bytes begin .. end - 1 of a slab.
  struct Range {
    int slab;
    std::size_t begin;
    std::size_t end;
  };

  // At most about `limit_bytes` of the file stay in memory. Throws FileError.
  RowFile(const std::string& directory, std::size_t limit_bytes, MemoryAccount* account);
  RowFile(const RowFile&) = delete;
  RowFile& operator=(const RowFile&) = delete;
  ~RowFile();

  // The next slab, of at least `bytes`: addresses, without disk space. Throws std::bad_alloc.
  char* add_slab(std::size_t bytes);
  // Disk space for everything before byte `end` of a slab; new bytes are zero. Throws FileError.
  void allocate(int slab, std::size_t end);
  // Throws std::runtime_error in a process other than the one that made the file: changes there
  // would be changes here.
  void check_process() const;

  // Says that `count` ranges, range(i) each (slab < 0: none), are about to be read or written.
  template <typename RangeOf>
  void use(std::int64_t count, bool writes, const RangeOf& range) noexcept {
    Use call(this, writes);
    for (std::int64_t i = 0; i < count; ++i) call.add(range(i));
    call.finish();
  }
  // How many ranges of `bytes` one call of `use` should name at most.
  std::int64_t portion(std::size_t bytes) const;

  RowFileCounters counters() const;

 private:
  // State of a page: tick << 3 | bits; 0 where it is out.
  using State = std::uint32_t;
  static constexpr State kIn = 1;
  static constexpr State kChanged = 2;
  static constexpr State kQueued = 4;  // Chosen to go, and not used since.
  static constexpr int kTickShift = 3;

  struct Slab {
    char* data = nullptr;
    std::size_t first_page = 0;  // Of the file.
    std::size_t num_pages = 0;
    Block states;
    std::atomic<State>* pages() const { return static_cast<std::atomic<State>*>(states.data()); }
  };
  struct Queued {
    std::uint64_t page;  // Of the file.
    State state;
    bool written;
  };
  // One call of `use`.
  class Use {
   public:
    Use(RowFile* file, bool writes) noexcept;
    void add(const Range& range) noexcept;
    void finish() noexcept;

   private:
    RowFile* const file_;
    const bool writes_;
    const State tick_;
    std::uint64_t num_missing_ = 0;
    std::vector<std::uint64_t> missing_;
  };

  std::atomic<State>* state_of(std::uint64_t page) const;
  void ask_for(std::vector<std::uint64_t>* pages);
  void make_room(std::uint64_t expected);
  void choose_oldest(std::uint64_t count);
  void write_queued(std::size_t end);
  void drop_queued(std::uint64_t excess, std::size_t end);
  void drop_run(std::uint64_t page, std::uint64_t count, bool written) const;

  static constexpr int kMaxSlabs = 40;
  const std::string directory_;
  const int process_;
  int page_shift_ = 12;
  std::uint64_t limit_pages_ = 0;
  int descriptor_ = -1;
  MemoryAccount* account_;
  Slab slabs_[kMaxSlabs];
  std::atomic<int> num_slabs_{0};
  std::uint64_t num_pages_ = 0;  // Of all slabs.
  std::atomic<std::uint64_t> allocated_bytes_{0};
  std::atomic<State> tick_{0};
  std::atomic<std::uint64_t> resident_pages_{0};
  std::atomic<std::uint64_t> read_pages_{0};
  std::atomic<std::uint64_t> written_pages_{0};
  std::atomic<std::uint64_t> dropped_pages_{0};
  std::mutex room_mutex_;  // Of the queue.
  std::vector<Queued> queue_;
  std::size_t next_ = 0;     // The first entry that was not dropped or passed over,
  std::size_t written_ = 0;  // and the first that was not written.
};

}  // namespace nestpipe
