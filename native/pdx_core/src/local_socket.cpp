#include "pdx/local_socket.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <system_error>

namespace pdx {
namespace {

bool would_wait(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

// Room for one control message of `count` descriptors, aligned as a header must be.
std::vector<std::max_align_t> ancillary(std::size_t count) {
  return std::vector<std::max_align_t>(CMSG_SPACE(count * sizeof(int)) / sizeof(std::max_align_t) +
                                       1);
}

}  // namespace

std::ptrdiff_t send_now(int fd, std::span<const iovec> parts, std::span<const int> descriptors) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  std::vector<std::max_align_t> control;
  if (!descriptors.empty()) {
    control = ancillary(descriptors.size());
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  }
  for (;;) {
    const ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (would_wait(errno)) return -1;
    if (errno != EINTR) throw std::system_error(errno, std::generic_category(), "sendmsg");
  }
}

Received receive_now(int fd, std::span<std::byte> into, std::size_t descriptors_max) {
  std::vector<std::max_align_t> control = ancillary(descriptors_max);
  iovec part{into.data(), into.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(descriptors_max * sizeof(int));
  ssize_t length = 0;
  do {
    length = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (length < 0 && errno == EINTR);
  if (length < 0) {
    if (would_wait(errno)) return {-1, false, {}};
    throw std::system_error(errno, std::generic_category(), "recvmsg");
  }
  Received received{length, (message.msg_flags & MSG_CTRUNC) != 0, {}};
  for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr;
       each = CMSG_NXTHDR(&message, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t bytes = each->cmsg_len - CMSG_LEN(0);
    const std::size_t before = received.descriptors.size();
    received.descriptors.resize(before + bytes / sizeof(int));
    std::memcpy(received.descriptors.data() + before, CMSG_DATA(each),
                bytes / sizeof(int) * sizeof(int));
  }
  return received;
}

}  // namespace pdx
