#include "pdx/pieces.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <system_error>
#include <vector>

namespace pdx::bench {
namespace {

constexpr std::size_t kPiecesPerCall = 64;

char* at(Bases bases, std::int64_t region, std::int64_t offset) {
  const std::uint64_t address =
      bases[static_cast<std::size_t>(region)] + static_cast<std::uint64_t>(offset);
  return reinterpret_cast<char*>(address);
}

[[noreturn]] void fail(int error, const char* call) {
  throw std::system_error(error, std::generic_category(), call);
}

// Drops `done` bytes from the front of the vectors, starting at `first`; returns the new first.
std::size_t advance(std::vector<iovec>& pieces, std::size_t first, std::size_t done) {
  while (done > 0 && done >= pieces[first].iov_len) {
    done -= pieces[first].iov_len;
    ++first;
  }
  if (done > 0) {
    pieces[first].iov_base = static_cast<char*>(pieces[first].iov_base) + done;
    pieces[first].iov_len -= done;
  }
  return first;
}

template <typename Call>
void move_all(std::vector<iovec>& pieces, Call call) {
  for (std::size_t first = 0; first < pieces.size();) {
    msghdr message{};
    message.msg_iov = &pieces[first];
    message.msg_iovlen = std::min(kPiecesPerCall, pieces.size() - first);
    const ssize_t done = call(&message);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail(errno, "socket");
    if (done == 0) fail(ECONNRESET, "socket");
    first = advance(pieces, first, static_cast<std::size_t>(done));
  }
}

}  // namespace

void copy_runs(Runs runs, Bases source, Bases destination) {
  for (const Run& run : runs) {
    std::memcpy(at(destination, run.destination_region, run.destination_offset),
                at(source, run.source_region, run.source_offset),
                static_cast<std::size_t>(run.length));
  }
}

void vm_write_runs(pid_t pid, Runs runs, Bases source, Bases destination) {
  for (const Run& run : runs) {
    const auto length = static_cast<std::size_t>(run.length);
    const iovec here{at(source, run.source_region, run.source_offset), length};
    const iovec there{at(destination, run.destination_region, run.destination_offset), length};
    const ssize_t done = process_vm_writev(pid, &here, 1, &there, 1, 0);
    if (done < 0) fail(errno, "process_vm_writev");
    if (static_cast<std::size_t>(done) != length) fail(EIO, "process_vm_writev");
  }
}

void send_runs(int socket, Runs runs, Bases source) {
  std::vector<iovec> pieces;
  pieces.reserve(runs.size());
  for (const Run& run : runs) {
    pieces.push_back(
        {at(source, run.source_region, run.source_offset), static_cast<std::size_t>(run.length)});
  }
  move_all(pieces, [socket](msghdr* message) { return sendmsg(socket, message, MSG_NOSIGNAL); });
}

void receive_runs(int socket, Runs runs, Bases destination) {
  std::vector<iovec> pieces;
  pieces.reserve(runs.size());
  for (const Run& run : runs) {
    pieces.push_back({at(destination, run.destination_region, run.destination_offset),
                      static_cast<std::size_t>(run.length)});
  }
  move_all(pieces, [socket](msghdr* message) { return recvmsg(socket, message, 0); });
}

std::int64_t first_difference(Runs runs, Bases source, Bases destination) {
  for (std::size_t index = 0; index < runs.size(); ++index) {
    const Run& run = runs[index];
    if (std::memcmp(at(source, run.source_region, run.source_offset),
                    at(destination, run.destination_region, run.destination_offset),
                    static_cast<std::size_t>(run.length)) != 0) {
      return static_cast<std::int64_t>(index);
    }
  }
  return -1;
}

}  // namespace pdx::bench
