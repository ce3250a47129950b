// Checks of native tests: they print both values and let the program go on; main returns how many
// failed.
#pragma once

#include <iostream>

namespace nestpipe {

inline int& failures() {
  static int count = 0;
  return count;
}

template <typename Got, typename Expected>
void check_equal(const char* file, int line, const char* what, const Got& got,
                 const Expected& expected) {
  if (got == expected) return;
  ++failures();
  std::cerr << file << ":" << line << ": " << what << ": got " << got << ", expected " << expected
            << "\n";
}

}  // namespace nestpipe

#define CHECK_EQUAL(got, expected) \
  ::nestpipe::check_equal(__FILE__, __LINE__, #got, (got), (expected))
// Passes where the statement throws an exception of this type.
#define CHECK_THROWS(type, statement)                                      \
  do {                                                                     \
    bool thrown = false;                                                   \
    try {                                                                  \
      statement;                                                           \
    } catch (const type&) {                                                \
      thrown = true;                                                       \
    }                                                                      \
    ::nestpipe::check_equal(__FILE__, __LINE__, #statement, thrown, true); \
  } while (false)
