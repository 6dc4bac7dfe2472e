// One call on a connected Unix stream socket, which never waits.
//
// For callers that hold an interpreter's lock and keep it: giving it up for a call of a few
// microseconds can cost milliseconds until another thread gives it back.
#pragma once
#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <vector>

namespace pdx {

// Gives the kernel what it takes of `parts`, the descriptors with the first byte. Returns the bytes
// taken; -1: the socket is full. Throws std::system_error.
std::ptrdiff_t send_now(int fd, std::span<const iovec> parts, std::span<const int> descriptors);

struct Received {
  std::ptrdiff_t length;         // -1: nothing is there; 0: the end of the stream
  bool truncated;                // descriptors were lost
  std::vector<int> descriptors;  // close-on-exec, the caller's
};

// Reads at most `into.size()` bytes, and at most `descriptors_max` descriptors that come with them.
// Throws std::system_error.
Received receive_now(int fd, std::span<std::byte> into, std::size_t descriptors_max);

}  // namespace pdx
