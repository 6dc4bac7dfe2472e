// What the UCX tests share: checks that print where they failed, and waiting for completions.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "pdx/ucx/engine.h"
#include "pdx/ucx/status.h"

#define CHECK(condition) pdx::testing::check((condition), #condition, __FILE__, __LINE__)

namespace pdx::testing {

inline void check(bool passed, const char* condition, const char* file, int line) {
  if (!passed) {
    std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, condition);
    // No cleaning up: threads may be in the middle of anything.
    std::_Exit(1);
  }
}

// True when `work` throws an Error whose text contains `part`.
template <typename Error>
bool throws(const std::function<void()>& work, const std::string& part) {
  try {
    work();
  } catch (const Error& error) {
    if (std::string(error.what()).find(part) != std::string::npos) {
      return true;
    }
    std::fprintf(stderr, "thrown: %s\n", error.what());
  }
  return false;
}

// `count` is a multiple of 8.
inline std::vector<char> random_bytes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<char> bytes(count);
  for (std::size_t i = 0; i + 8 <= count; i += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, 8);
  }
  return bytes;
}

inline ucx::EngineOptions options(const std::string& lane) {
  ucx::EngineOptions made;
  made.lane.lane = lane;
  // One device keeps the tests independent of the machine's network.
  made.lane.net_devices = "lo";
  return made;
}

inline ucx::Range range_of(const void* data, std::size_t size) {
  return {reinterpret_cast<std::uint64_t>(data), size};
}

// Everything an engine told, in order.
class Told {
 public:
  explicit Told(ucx::Engine& engine) : engine_(engine) {}

  using Matches = std::function<bool(const ucx::Completion&)>;

  // The first completion that matches, within the time; the test fails otherwise.
  ucx::Completion wait(const char* what, const Matches& matches, double seconds = 20.0) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (true) {
      for (const auto& done : list) {
        if (matches(done)) {
          return done;
        }
      }
      if (std::chrono::steady_clock::now() > end) {
        std::fprintf(stderr, "not told within %.1f s: %s\n", seconds, what);
        for (const auto& done : list) {
          std::fprintf(stderr, "  event %d id %llu generation %llu ticket %llu %s\n",
                       static_cast<int>(done.event), static_cast<unsigned long long>(done.id),
                       static_cast<unsigned long long>(done.generation),
                       static_cast<unsigned long long>(done.ticket), done.error.c_str());
        }
        std::_Exit(1);
      }
      engine_.wait(0.05);
      for (auto& done : engine_.drain()) {
        list.push_back(std::move(done));
      }
    }
  }

  ucx::Completion wait(ucx::Event event, double seconds = 20.0) {
    return wait(
        "an event of this kind", [=](const auto& done) { return done.event == event; }, seconds);
  }

  ucx::Completion ticket(std::uint64_t number, double seconds = 20.0) {
    return wait("a ticket", [=](const auto& done) { return done.ticket == number; }, seconds);
  }

  std::size_t count(ucx::Event event) const {
    std::size_t found = 0;
    for (const auto& done : list) {
      found += done.event == event ? 1 : 0;
    }
    return found;
  }

  std::vector<ucx::Completion> list;

 private:
  ucx::Engine& engine_;
};

// Rows of one post and its splits.
struct Runs {
  std::vector<std::int64_t> values;
  std::vector<std::int64_t> splits{0};

  void add(std::uint64_t source, std::uint64_t destination, std::uint64_t length) {
    const auto n = [](std::uint64_t value) { return static_cast<std::int64_t>(value); };
    values.insert(values.end(), {0, n(source), 0, n(destination), n(length)});
  }
  void end_batch() { splits.push_back(static_cast<std::int64_t>(values.size() / 5)); }
  ucx::RunTable table() const { return {values, splits}; }
};

// `count` pieces of `length` bytes, in an order of the destination that is not that of the source.
inline Runs shuffled(std::size_t count, std::size_t length, std::size_t batches,
                     std::uint64_t seed) {
  std::vector<std::size_t> order(count);
  for (std::size_t i = 0; i < count; ++i) {
    order[i] = i;
  }
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  Runs runs;
  for (std::size_t i = 0; i < count; ++i) {
    runs.add(i * length, order[i] * length, length);
    if ((i + 1) % (count / batches) == 0) {
      runs.end_batch();
    }
  }
  return runs;
}

// Whether `destination` holds what those runs copy from `source`.
inline bool landed(const Runs& runs, const char* source, const char* destination) {
  for (std::size_t i = 0; i < runs.values.size(); i += 5) {
    if (std::memcmp(source + runs.values[i + 1], destination + runs.values[i + 3],
                    static_cast<std::size_t>(runs.values[i + 4])) != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace pdx::testing
