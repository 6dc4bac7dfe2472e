// Time as deadlines use it: nanoseconds of the steady clock.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>

namespace pdx::ucx {

inline std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

inline std::uint64_t after_ns(double seconds) {
  const double bounded = std::clamp(seconds, 0.0, 1e6);
  return now_ns() + static_cast<std::uint64_t>(bounded * 1e9);
}

}  // namespace pdx::ucx
