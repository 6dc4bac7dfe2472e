// What one side of a lane tells the other: how to reach its worker, and which UCX made it.
#pragma once
#include <cstdint>
#include <string>

#include "pdx/ucx/region.h"

namespace pdx::ucx {

// The address of a send worker or of a receive worker, as it travels in `Accept` and `Attach`.
struct LaneAddress {
  unsigned ucx_major = 0;
  unsigned ucx_minor = 0;
  // UCX's own worker address.
  std::string worker;
  // A few bytes of the receiver that nobody reads: the sender writes them once to learn whether
  // writes work at all. Empty key: none (address of a send worker).
  RemoteRange probe{};

  // "PDX2", the CRC-32 of what follows, UCX's major and minor, and the fields with their lengths;
  // numbers are little-endian.
  std::string pack() const;
  // Throws UsageError naming what is wrong with `data`.
  static LaneAddress unpack(const std::string& data);
  // Empty, or why this runtime cannot talk to that one.
  std::string version_problem(unsigned our_major, unsigned our_minor) const;
};

// The first message on a path: its number at the sender, and the packed address of the sender's
// worker. The welcome is the number alone.
struct Hello {
  std::uint64_t path = 0;
  std::string send_address;
};
std::string pack_hello(std::uint64_t path, const std::string& send_address);
// Throws UsageError when `data` is too short.
Hello unpack_hello(const std::string& data);

}  // namespace pdx::ucx
