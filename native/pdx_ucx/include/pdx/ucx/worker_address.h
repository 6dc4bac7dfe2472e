// What UCX calls a worker by, read before UCX itself reads it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pdx::ucx {

// UCX's packed worker address, version 1 (`UCX_ADDRESS_VERSION=v1`), as UCX 1.13 to 1.22 write it:
//
//   header 1, worker id 8, then for each device: memory domain 1, length and flags 1,
//   [system device 1], device address, and for each transport on it: name checksum 2,
//   attributes 16, length and flags 1, interface address. Since UCX 1.16 a device without
//   transports ends the list; its memory domain is UCX's minor version.
//
// UCX takes no length with an address, follows whatever stands in it, and ends the process at what
// it does not expect. So an address from outside is read here first: every byte is accounted for,
// and only what the workers of a pdxfer lane say is let through.
class WorkerAddress {
 public:
  // One transport on one device.
  struct Entry {
    std::uint16_t transport = 0;
    std::uint32_t capabilities = 0;
    std::string device;
    std::string interface;
  };

  // Throws UsageError that says at which byte of how many `packed` is wrong.
  static WorkerAddress parse(std::string_view packed);

  // Empty, or why the address `theirs`, in `packed` form, is not to be handed to UCX by a worker
  // that is itself called `ours`: it is malformed, of the same worker, or tells of transports,
  // capabilities or a UCX version other than those that a worker of the same lane has.
  static std::string problem(std::string_view theirs, const WorkerAddress& ours);

  // Of the addresses that tcp listens on: "inet", "inet6", both with a comma between them, or
  // empty.
  std::string families() const;

  std::uint64_t worker = 0;
  // UCX's minor version modulo 16, or -1 where none is told.
  int release = -1;
  std::vector<Entry> entries;
};

}  // namespace pdx::ucx
