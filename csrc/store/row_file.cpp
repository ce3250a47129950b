// The file of rows: making it, its space on the disk, and which of its pages are in memory.
#include "nestpipe/row_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace nestpipe {
namespace {

constexpr std::size_t kSmallestStep = std::size_t{1} << 20;  // Of disk space.
constexpr std::size_t kPagesPerRead = 32;  // More than some systems read ahead in one call.
constexpr std::uint64_t kQueueShare = 16;  // Part of the limit that is chosen to go at once.

// What other systems than Linux lack leaves the constructor without a file to work on.
#ifdef __linux__
int reserve_space(int file, off_t begin, off_t bytes) {
  return posix_fallocate(file, begin, bytes);
}
void ask(int file, off_t begin, off_t bytes) {
  posix_fadvise(file, begin, bytes, POSIX_FADV_WILLNEED);
}
void forget(int file, off_t begin, off_t bytes) {
  posix_fadvise(file, begin, bytes, POSIX_FADV_DONTNEED);
}
void start_writing(int file, off_t begin, off_t bytes) {
  sync_file_range(file, begin, bytes, SYNC_FILE_RANGE_WRITE);
}
void finish_writing(int file, off_t begin, off_t bytes) {
  sync_file_range(file, begin, bytes, SYNC_FILE_RANGE_WAIT_BEFORE);
}
#else
int reserve_space(int, off_t, off_t) { return ENOSYS; }
void ask(int, off_t, off_t) {}
void forget(int, off_t, off_t) {}
void start_writing(int, off_t, off_t) {}
void finish_writing(int, off_t, off_t) {}
#endif

std::string reason(int code) { return std::strerror(code); }

int open_unnamed(const std::string& directory) {
#ifndef __linux__
  errno = ENOSYS;
  return -1;
#endif
#ifdef O_TMPFILE
  const int unnamed = open(directory.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
  if (unnamed >= 0) return unnamed;
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL) return -1;
#endif
  // File systems without unnamed files: the name goes at once.
  std::string path = directory + "/nestpipe-rows-XXXXXX";
  const int named = mkstemp(path.data());
  if (named < 0) return -1;
  unlink(path.c_str());
  fcntl(named, F_SETFD, FD_CLOEXEC);
  return named;
}

// Calls visit(page, count) for runs of successive pages, each at most `longest`.
template <typename Visit>
void for_each_run(const std::vector<std::uint64_t>& pages, std::uint64_t longest,
                  const Visit& visit) {
  for (std::size_t begin = 0; begin < pages.size();) {
    std::size_t end = begin + 1;
    while (end < pages.size() && end - begin < longest && pages[end] == pages[end - 1] + 1) ++end;
    visit(pages[begin], end - begin);
    begin = end;
  }
}

}  // namespace

RowFile::RowFile(const std::string& directory, std::size_t limit_bytes, MemoryAccount* account)
    : directory_(directory), process_(getpid()), account_(account) {
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  page_shift_ = 63 - __builtin_clzll(page_bytes);
  limit_pages_ = std::max<std::uint64_t>(limit_bytes >> page_shift_, 4);
  descriptor_ = open_unnamed(directory);
  if (descriptor_ < 0) {
    throw FileError(errno, "store: FileTier cannot make a file in directory '" + directory +
                               "': " + reason(errno) +
                               "; give a directory that exists and that this process may write to");
  }
}

RowFile::~RowFile() {
  for (int s = 0; s < num_slabs_.load(); ++s) {
    munmap(slabs_[s].data, slabs_[s].num_pages << page_shift_);
  }
  close(descriptor_);
}

char* RowFile::add_slab(std::size_t bytes) {
  const int number = num_slabs_.load(std::memory_order_relaxed);
  if (number == kMaxSlabs) throw std::bad_alloc();
  Slab slab;
  slab.first_page = num_pages_;
  slab.num_pages = ((bytes - 1) >> page_shift_) + 1;
  slab.states = Block(account_, slab.num_pages * sizeof(State));
  new (slab.states.data()) std::atomic<State>[ slab.num_pages ]();
  void* const data =
      mmap(nullptr, slab.num_pages << page_shift_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_,
           static_cast<off_t>(slab.first_page << page_shift_));
  if (data == MAP_FAILED) throw std::bad_alloc();
  slab.data = static_cast<char*>(data);
  // Rows lie anywhere: a page brings no others with it.
  madvise(data, slab.num_pages << page_shift_, MADV_RANDOM);
  num_pages_ += slab.num_pages;
  slabs_[number] = std::move(slab);
  num_slabs_.store(number + 1, std::memory_order_release);
  return slabs_[number].data;
}

void RowFile::allocate(int slab, std::size_t end) {
  const auto round_up = [this](std::uint64_t bytes) {
    return ((bytes + (std::uint64_t{1} << page_shift_) - 1) >> page_shift_) << page_shift_;
  };
  const std::uint64_t allocated = allocated_bytes_.load(std::memory_order_relaxed);
  const std::uint64_t needed = round_up((slabs_[slab].first_page << page_shift_) + end);
  if (needed <= allocated) return;
  const std::uint64_t step = std::max<std::uint64_t>(kSmallestStep, allocated / 8);
  const std::uint64_t wanted = std::max(
      needed, std::min<std::uint64_t>(num_pages_ << page_shift_, round_up(allocated + step)));
  int code = EINTR;
  for (const std::uint64_t size : {wanted, needed}) {
    do {
      code = reserve_space(descriptor_, static_cast<off_t>(allocated),
                           static_cast<off_t>(size - allocated));
    } while (code == EINTR);
    if (code == 0) {
      allocated_bytes_.store(size, std::memory_order_relaxed);
      return;
    }
  }
  throw FileError(code, "store: the file of rows in directory '" + directory_ +
                            "' cannot grow from " + std::to_string(allocated) + " to " +
                            std::to_string(needed) + " bytes: " + reason(code) +
                            "; nothing has changed: free disk space, choose another directory for "
                            "FileTier, or limit the tables' capacity");
}

void RowFile::check_process() const {
  if (getpid() == process_) return;
  throw std::runtime_error(
      "store: rows of a FileTier belong to the process that made the store: a forked child would "
      "change them for its parent; make the store in the child, or start it with 'spawn'");
}

std::int64_t RowFile::portion(std::size_t bytes) const {
  const std::uint64_t pages = 1 + ((bytes - 1) >> page_shift_);
  return static_cast<std::int64_t>(std::max<std::uint64_t>(16, limit_pages_ / 4 / pages));
}

RowFileCounters RowFile::counters() const {
  const auto value = [](const std::atomic<std::uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  return {value(allocated_bytes_),
          value(resident_pages_),
          limit_pages_,
          std::uint64_t{1} << page_shift_,
          value(read_pages_),
          value(written_pages_),
          value(dropped_pages_)};
}

std::atomic<RowFile::State>* RowFile::state_of(std::uint64_t page) const {
  int s = num_slabs_.load(std::memory_order_acquire) - 1;
  while (slabs_[s].first_page > page) --s;
  return slabs_[s].pages() + (page - slabs_[s].first_page);
}

// ------------------------------------------------------------------------------------------- use

RowFile::Use::Use(RowFile* file, bool writes) noexcept
    : file_(file),
      writes_(writes),
      tick_(file->tick_.fetch_add(1, std::memory_order_relaxed) + 1) {}

void RowFile::Use::add(const Range& range) noexcept {
  if (range.slab < 0) return;
  const Slab& slab = file_->slabs_[range.slab];
  const std::size_t last = (range.end - 1) >> file_->page_shift_;
  for (std::size_t page = range.begin >> file_->page_shift_; page <= last; ++page) {
    std::atomic<State>& state = slab.pages()[page];
    State before = state.load(std::memory_order_relaxed);
    State after;
    do {
      after = tick_ << kTickShift | kIn | (before & kChanged) | (writes_ ? kChanged : 0);
      if (before == after) break;
    } while (!state.compare_exchange_weak(before, after, std::memory_order_relaxed));
    if ((before & kIn) != 0) continue;
    ++num_missing_;
    try {
      missing_.push_back(slab.first_page + page);
    } catch (const std::bad_alloc&) {
      // Then it comes when it is touched.
    }
  }
}

void RowFile::Use::finish() noexcept {
  if (num_missing_ == 0) return;
  file_->resident_pages_.fetch_add(num_missing_, std::memory_order_relaxed);
  try {
    file_->ask_for(&missing_);
    file_->make_room(num_missing_);
  } catch (const std::bad_alloc&) {
    // Less is asked for, or more stays, until there is memory again.
  }
}

void RowFile::ask_for(std::vector<std::uint64_t>* pages) {
  std::sort(pages->begin(), pages->end());
  for_each_run(*pages, kPagesPerRead, [this](std::uint64_t page, std::uint64_t count) {
    ask(descriptor_, static_cast<off_t>(page << page_shift_),
        static_cast<off_t>(count << page_shift_));
  });
  read_pages_.fetch_add(pages->size(), std::memory_order_relaxed);
}

// Leaves room for as many pages as have just come, so that the next call's fit, too. Pages are
// written in one call and dropped in a later one, when the disk has them.
void RowFile::make_room(std::uint64_t expected) {
  const std::uint64_t target = limit_pages_ - std::min(expected, limit_pages_ / 2);
  if (resident_pages_.load(std::memory_order_relaxed) <= target) return;
  const std::unique_lock<std::mutex> lock(room_mutex_, std::try_to_lock);
  if (!lock) return;  // Another thread is at it.
  const std::uint64_t excess = resident_pages_.load(std::memory_order_relaxed) - target;
  if (static_cast<std::int64_t>(excess) <= 0) return;
  if (queue_.size() - next_ < 2 * excess) {
    choose_oldest(std::max(limit_pages_ / kQueueShare, 2 * excess));
  }
  const std::size_t written_before = std::max(written_, next_);
  write_queued(std::min<std::size_t>(queue_.size(), next_ + 2 * excess));
  drop_queued(excess, written_before);
}

// Queues pages that have not been used for the longest time.
void RowFile::choose_oldest(std::uint64_t count) {
  const State now = tick_.load(std::memory_order_relaxed);
  std::vector<std::pair<State, std::uint64_t>> found;
  const int num_slabs = num_slabs_.load(std::memory_order_acquire);
  for (int s = 0; s < num_slabs; ++s) {
    for (std::size_t page = 0; page < slabs_[s].num_pages; ++page) {
      const State state = slabs_[s].pages()[page].load(std::memory_order_relaxed);
      if ((state & kIn) == 0 || (state & kQueued) != 0 || state >> kTickShift >= now) continue;
      found.emplace_back(state, slabs_[s].first_page + page);
    }
  }
  if (count < found.size()) {
    std::nth_element(
        found.begin(), found.begin() + static_cast<std::ptrdiff_t>(count), found.end(),
        [](const auto& a, const auto& b) { return a.first >> kTickShift < b.first >> kTickShift; });
    found.resize(count);
  }
  // By place, so that neighbours are written and dropped together.
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.second < b.second; });
  queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(next_));
  written_ = std::max(written_, next_) - next_;
  next_ = 0;
  queue_.reserve(queue_.size() + found.size());
  for (const auto& [state, page] : found) {
    State before = state;
    if (state_of(page)->compare_exchange_strong(before, state | kQueued,
                                                std::memory_order_relaxed)) {
      queue_.push_back({page, state | kQueued, false});
    }
  }
}

// Starts to write those of the queue's entries before `end` that have changed.
void RowFile::write_queued(std::size_t end) {
  std::vector<std::uint64_t> pages;
  for (written_ = std::max(written_, next_); written_ < end; ++written_) {
    Queued& entry = queue_[written_];
    if ((entry.state & kChanged) == 0) continue;
    State before = entry.state;
    const State after = before & ~kChanged;
    if (!state_of(entry.page)->compare_exchange_strong(before, after, std::memory_order_relaxed)) {
      continue;  // Used since.
    }
    entry.state = after;
    entry.written = true;
    pages.push_back(entry.page);
  }
  for_each_run(pages, ~std::uint64_t{0}, [this](std::uint64_t page, std::uint64_t count) {
    start_writing(descriptor_, static_cast<off_t>(page << page_shift_),
                  static_cast<off_t>(count << page_shift_));
  });
  written_pages_.fetch_add(pages.size(), std::memory_order_relaxed);
}

// Takes up to `excess` pages out of memory: entries before `end`, and later ones that did not have
// to be written.
void RowFile::drop_queued(std::uint64_t excess, std::size_t end) {
  std::uint64_t dropped = 0;
  std::uint64_t run = 0;
  std::uint64_t run_pages = 0;
  bool run_written = false;
  for (; next_ < queue_.size() && next_ < written_ && dropped < excess; ++next_) {
    const Queued& entry = queue_[next_];
    if (next_ >= end && entry.written) break;
    State before = entry.state;
    if (!state_of(entry.page)->compare_exchange_strong(before, 0, std::memory_order_relaxed)) {
      continue;  // Used since.
    }
    ++dropped;
    if (run_pages > 0 && entry.page == run + run_pages) {
      ++run_pages;
      run_written = run_written || entry.written;
      continue;
    }
    if (run_pages > 0) drop_run(run, run_pages, run_written);
    run = entry.page;
    run_pages = 1;
    run_written = entry.written;
  }
  if (run_pages > 0) drop_run(run, run_pages, run_written);
  resident_pages_.fetch_sub(dropped, std::memory_order_relaxed);
  dropped_pages_.fetch_add(dropped, std::memory_order_relaxed);
}

// A run may reach over several slabs.
void RowFile::drop_run(std::uint64_t page, std::uint64_t count, bool written) const {
  const auto offset = static_cast<off_t>(page << page_shift_);
  const auto bytes = static_cast<off_t>(count << page_shift_);
  if (written) finish_writing(descriptor_, offset, bytes);
  const std::uint64_t end = page + count;
  for (int s = num_slabs_.load(std::memory_order_acquire) - 1; s >= 0; --s) {
    const std::uint64_t first = std::max<std::uint64_t>(page, slabs_[s].first_page);
    const std::uint64_t last =
        std::min<std::uint64_t>(end, slabs_[s].first_page + slabs_[s].num_pages);
    if (first >= last) continue;
    madvise(slabs_[s].data + ((first - slabs_[s].first_page) << page_shift_),
            (last - first) << page_shift_, MADV_DONTNEED);
  }
  forget(descriptor_, offset, bytes);
}

}  // namespace nestpipe
