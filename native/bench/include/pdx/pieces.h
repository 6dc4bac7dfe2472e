// The bench's own movers: the same runs that a lane gets, moved by the plainest means there are.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <span>

namespace pdx::bench {

// One contiguous copy; the columns of a plan's runs.
struct Run {
  std::int64_t source_region;
  std::int64_t source_offset;
  std::int64_t destination_region;
  std::int64_t destination_offset;
  std::int64_t length;
};

// Addresses of the regions, in the process that owns them.
using Bases = std::span<const std::uint64_t>;
using Runs = std::span<const Run>;

// memcpy, one call a run. Both sides are memory of this process.
void copy_runs(Runs runs, Bases source, Bases destination);

// process_vm_writev, one call a run; `destination` are addresses in process `pid`.
// Throws std::system_error on the first error or short write.
void vm_write_runs(pid_t pid, Runs runs, Bases source, Bases destination);

// The bytes of the runs in their order over a connected blocking socket, straight from and into
// place, up to 64 runs a system call. Throws std::system_error; a closed peer is ECONNRESET.
void send_runs(int socket, Runs runs, Bases source);
void receive_runs(int socket, Runs runs, Bases destination);

// The first run whose bytes differ between the two sides, or -1.
std::int64_t first_difference(Runs runs, Bases source, Bases destination);

}  // namespace pdx::bench
