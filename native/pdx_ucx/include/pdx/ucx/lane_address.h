// What one side of a lane tells the other: how to reach its worker, and which UCX made it.
#pragma once
#include <cstdint>
#include <string>

#include "pdx/ucx/region.h"

namespace pdx::ucx {

// The address of a receiver or of a sender, as it travels in `Attach` and `Accept`.
struct LaneAddress {
  unsigned ucx_major = 0;
  unsigned ucx_minor = 0;
  // UCX's own worker address. Of a sender: bytes by which it is known; the address of each of its
  // workers comes with the hello.
  std::string worker;
  // A few bytes of the receiver that nobody reads: the sender writes them once to learn whether
  // writes work at all. Empty key: none (address of a sender).
  RemoteRange probe{};

  // "PDX2", the CRC-32 of what follows, UCX's major and minor, and the fields with their lengths;
  // numbers are little-endian.
  std::string pack() const;
  // Throws UsageError naming what is wrong with `data`.
  static LaneAddress unpack(const std::string& data);
  // Empty, or why this runtime cannot talk to that one.
  std::string version_problem(unsigned our_major, unsigned our_minor) const;
};

// The first message on a path.
struct Hello {
  // The path's number at the sender; the welcome repeats it.
  std::uint64_t path = 0;
  // Packed lane addresses: what the sender calls itself, and the worker of this path.
  std::string sender;
  std::string worker;

  std::string pack() const;
  // Throws UsageError when `data` ends too soon.
  static Hello unpack(const std::string& data);
};

std::string pack_welcome(std::uint64_t path);

}  // namespace pdx::ucx
