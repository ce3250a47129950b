// A persistent pool of helper threads that join whatever loops are open.
//
// A call to parallel_tasks opens a loop (an object on the caller's stack), the caller itself takes
// tasks until none is left, and up to num_threads() - 1 helpers do the same. Task numbers come from
// one atomic counter. The caller then closes the loop (no helper can join any more) and waits for
// the helpers inside it, so the object outlives every use of it. Because callers take part, a loop
// always finishes: also with no helper, with several callers, and when a task opens a loop of its
// own.
//
// A call runs several loops one after the other, and waking a thread takes longer than many of
// them: so helpers look for the next loop for a little while before they sleep, and callers for the
// helpers' end. They let others have the core meanwhile.
//
// Threads do not survive fork(). The child forgets its parent's pool, locks included, and builds
// another at its first loop.
#include "nestpipe/parallel.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace nestpipe {
namespace {

constexpr std::chrono::microseconds kLook{100};

// Looks for a short time whether something has come true.
template <typename Predicate>
void look_for(const Predicate& predicate) {
  const auto end = std::chrono::steady_clock::now() + kLook;
  while (!predicate() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

struct Loop {
  Loop(std::int64_t size, const std::function<void(std::int64_t)>& body)
      : num_tasks(size), task(body) {}

  // Takes tasks until none is left. Never throws: the first failure by task number is kept.
  void work() {
    for (;;) {
      const std::int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= num_tasks) return;
      try {
        task(i);
      } catch (...) {
        const std::lock_guard<std::mutex> guard(failure_mutex);
        if (i < failed_task) {
          failed_task = i;
          failure = std::current_exception();
        }
      }
    }
  }

  const std::int64_t num_tasks;
  const std::function<void(std::int64_t)>& task;
  std::atomic<std::int64_t> next{0};
  std::mutex failure_mutex;
  std::int64_t failed_task = std::numeric_limits<std::int64_t>::max();
  std::exception_ptr failure;
  // Changed under the pool's mutex alone.
  int places_left = 0;
  std::atomic<int> helpers_inside{0};
};

class Pool {
 public:
  void run(Loop* loop, int num_helpers) {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      start_threads(num_helpers);
      try {
        open_.push_back(loop);
        num_open_.store(open_.size(), std::memory_order_relaxed);
        loop->places_left = num_helpers;
      } catch (const std::bad_alloc&) {
        num_helpers = 0;  // The caller works alone.
      }
    }
    if (num_helpers == 1) {
      loop_opened_.notify_one();
    } else if (num_helpers > 1) {
      loop_opened_.notify_all();
    }
    loop->work();
    std::unique_lock<std::mutex> lock(mutex_);
    close(loop);
    if (loop->helpers_inside != 0) {
      lock.unlock();
      look_for([loop] { return loop->helpers_inside == 0; });
      lock.lock();
    }
    loop_left_.wait(lock, [loop] { return loop->helpers_inside == 0; });
  }

 private:
  // Fewer threads than asked for only make loops slower, so failing to start one is no error.
  void start_threads(int num_helpers) {
    while (num_threads_ < num_helpers) {
      sigset_t all;
      sigset_t previous;
      sigfillset(&all);
      // Signals belong to the program's own threads; a helper inherits the mask of its creator.
      pthread_sigmask(SIG_SETMASK, &all, &previous);
      try {
        std::thread([this] { serve(); }).detach();
        ++num_threads_;
      } catch (const std::system_error&) {
        num_helpers = num_threads_;
      }
      pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    }
  }

  void close(Loop* loop) {
    open_.erase(std::remove(open_.begin(), open_.end(), loop), open_.end());
    num_open_.store(open_.size(), std::memory_order_relaxed);
  }

  [[noreturn]] void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      loop_opened_.wait(lock, [this] { return !open_.empty(); });
      Loop* loop = open_.front();
      ++loop->helpers_inside;
      if (--loop->places_left == 0) close(loop);
      lock.unlock();
      loop->work();
      lock.lock();
      close(loop);  // Nothing is left to take, so nobody else needs to join.
      if (--loop->helpers_inside == 0) loop_left_.notify_all();
      if (!open_.empty()) continue;
      lock.unlock();
      look_for([this] { return num_open_.load(std::memory_order_relaxed) != 0; });
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable loop_opened_;
  std::condition_variable loop_left_;
  std::vector<Loop*> open_;               // Loops that a helper may still join, oldest first.
  std::atomic<std::size_t> num_open_{0};  // Of these, to be looked at without the mutex.
  int num_threads_ = 0;
};

std::atomic<int> configured_threads{0};  // 0: not set, one per hardware thread.
std::atomic<Pool*> shared_pool{nullptr};

void forget_pool_in_child() { shared_pool.store(nullptr, std::memory_order_relaxed); }

// Never destroyed: helpers may be waiting in it while the process exits.
Pool& pool() {
  static const int at_fork = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  static_cast<void>(at_fork);
  Pool* current = shared_pool.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  Pool* created = new Pool;
  if (shared_pool.compare_exchange_strong(current, created)) return *created;
  delete created;
  return *current;
}

}  // namespace

void set_num_threads(int num_threads) {
  if (num_threads < 1) {
    throw std::invalid_argument("threads must be >= 1, got " + std::to_string(num_threads));
  }
  configured_threads.store(num_threads, std::memory_order_relaxed);
}

int num_threads() {
  const int configured = configured_threads.load(std::memory_order_relaxed);
  if (configured > 0) return configured;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void parallel_tasks(std::int64_t num_tasks, const std::function<void(std::int64_t)>& task) {
  if (num_tasks <= 0) return;
  Loop loop(num_tasks, task);
  const auto num_helpers = static_cast<int>(std::min<std::int64_t>(num_threads(), num_tasks)) - 1;
  if (num_helpers > 0) {
    pool().run(&loop, num_helpers);
  } else {
    loop.work();
  }
  if (loop.failure) std::rethrow_exception(loop.failure);
}

void parallel_ranges(std::int64_t size, std::int64_t grain,
                     const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (size <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  // A few ranges per thread even out threads that get less of a core.
  const std::int64_t wanted = num_threads() == 1 ? 1 : std::int64_t{4} * num_threads();
  const std::int64_t num_ranges = std::max<std::int64_t>(1, std::min(size / grain, wanted));
  const std::int64_t share = size / num_ranges;
  const std::int64_t longer = size % num_ranges;  // The first ranges take one element more.
  parallel_tasks(num_ranges, [&](std::int64_t i) {
    const std::int64_t begin = i * share + std::min(i, longer);
    body(begin, begin + share + (i < longer ? 1 : 0));
  });
}

}  // namespace nestpipe
