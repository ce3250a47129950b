// Runs independent tasks on a few threads. The result of every operation must not depend on how
// many there are.
#pragma once

#include <cstdint>
#include <functional>

namespace nestpipe {

// Threads of later bulk calls of this process, the caller's own included. Must be >= 1.
void set_num_threads(int num_threads);
int num_threads();

// Calls task(i) once for each i in [0, num_tasks), in any order, on up to num_threads() threads,
// the caller among them; returns when all are done. An exception of a task reaches the caller (the
// first one by task number); the other tasks still run. Several threads may call this at the same
// time. Works in a forked child.
void parallel_tasks(std::int64_t num_tasks, const std::function<void(std::int64_t)>& task);

// Splits [0, size) into contiguous ranges of at least `grain` elements and calls body(begin, end)
// for each.
void parallel_ranges(std::int64_t size, std::int64_t grain,
                     const std::function<void(std::int64_t, std::int64_t)>& body);

}  // namespace nestpipe
