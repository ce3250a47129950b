// Asks for a line of memory that will be used soon. Unlike a bare __builtin_prefetch, compilers
// take none of these for a call without effect: a function that does nothing else is left out
// otherwise.
#pragma once

namespace nestpipe {

inline void request_line(const void* at) {
  __builtin_prefetch(at);
  asm volatile("");
}

inline void request_line_to_write(const void* at) {
  __builtin_prefetch(at, 1);
  asm volatile("");
}

// Into the second cache: for more lines than the first one should hold.
inline void request_line_early(const void* at) {
  __builtin_prefetch(at, 0, 2);
  asm volatile("");
}

}  // namespace nestpipe
