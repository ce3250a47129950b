// The thread pool: every task once, any number of callers, nesting, exceptions, fork.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "nestpipe/parallel.h"

namespace nestpipe {
namespace {

std::int64_t sum_in_parallel(std::int64_t size) {
  std::atomic<std::int64_t> sum{0};
  parallel_tasks(size, [&](std::int64_t i) { sum += i; });
  return sum;
}

void test_every_task_runs_once() {
  for (const int threads : {1, 2, 4}) {
    set_num_threads(threads);
    for (const std::int64_t size : {0, 1, 63, 1000}) {
      std::vector<std::atomic<int>> runs(size);
      parallel_tasks(size, [&](std::int64_t i) { ++runs[i]; });
      for (const auto& count : runs) CHECK_EQUAL(count.load(), 1);
    }
  }
}

void test_ranges_cover_and_keep_their_grain() {
  set_num_threads(3);
  for (const std::int64_t size : {0, 1, 99, 100, 101, 12345}) {
    std::vector<std::atomic<int>> visits(size);
    std::atomic<std::int64_t> shortest{size};
    parallel_ranges(size, 100, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) ++visits[i];
      std::int64_t seen = shortest.load();
      while (end - begin < seen && !shortest.compare_exchange_weak(seen, end - begin)) {
      }
    });
    for (const auto& count : visits) CHECK_EQUAL(count.load(), 1);
    CHECK_EQUAL(shortest.load() >= std::min<std::int64_t>(size, 100), true);
  }
}

void test_first_exception_reaches_the_caller_and_the_rest_runs() {
  for (const int threads : {1, 4}) {
    set_num_threads(threads);
    std::atomic<int> finished{0};
    std::string message;
    try {
      parallel_tasks(50, [&](std::int64_t i) {
        if (i % 10 == 7) throw std::runtime_error("task " + std::to_string(i));
        ++finished;
      });
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    CHECK_EQUAL(message, "task 7");
    CHECK_EQUAL(finished.load(), 45);
  }
}

void test_several_callers_and_nesting() {
  set_num_threads(3);
  std::vector<std::thread> callers;
  std::atomic<std::int64_t> total{0};
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        parallel_tasks(4, [&](std::int64_t) { total += sum_in_parallel(10); });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQUAL(total.load(), 4 * 50 * 4 * 45);
}

void test_a_forked_child_has_its_own_pool() {
#if !defined(__SANITIZE_THREAD__)  // The sanitizer does not support threads after fork.
  set_num_threads(4);
  CHECK_EQUAL(sum_in_parallel(1000), 499500);
  const pid_t child = fork();
  if (child == 0) _exit(sum_in_parallel(1000) == 499500 ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  CHECK_EQUAL(WIFEXITED(status) && WEXITSTATUS(status) == 0, true);
#endif
}

void test_number_of_threads_is_checked() {
  CHECK_THROWS(std::invalid_argument, set_num_threads(0));
  set_num_threads(5);
  CHECK_EQUAL(num_threads(), 5);
}

}  // namespace
}  // namespace nestpipe

int main() {
  nestpipe::test_a_forked_child_has_its_own_pool();
  nestpipe::test_every_task_runs_once();
  nestpipe::test_ranges_cover_and_keep_their_grain();
  nestpipe::test_first_exception_reaches_the_caller_and_the_rest_runs();
  nestpipe::test_several_callers_and_nesting();
  nestpipe::test_number_of_threads_is_checked();
  return nestpipe::failures();
}
