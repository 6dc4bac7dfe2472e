// Checks for tests without a framework: a failed one names itself and ends the test.
#pragma once
#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

#define CHECK_THROWS(kind, expression)                                                      \
  do {                                                                                      \
    bool thrown = false;                                                                    \
    try {                                                                                   \
      (void)(expression);                                                                   \
    } catch (const kind&) {                                                                 \
      thrown = true;                                                                        \
    }                                                                                       \
    if (!thrown) {                                                                          \
      std::fprintf(stderr, "%s:%d: %s did not throw %s\n", __FILE__, __LINE__, #expression, \
                   #kind);                                                                  \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (false)
