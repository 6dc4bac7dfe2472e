// One call on a Unix socket: what it takes, what it says when it would have to wait, descriptors.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "check.h"
#include "pdx/local_socket.h"

namespace {

struct Ends {
  Ends() { CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0); }
  ~Ends() {
    if (fds[0] >= 0) close(fds[0]);
    close(fds[1]);
  }
  int fds[2];
};

std::ptrdiff_t send(int fd, std::string text, std::vector<int> descriptors = {}) {
  const iovec part{text.data(), text.size()};
  return pdx::send_now(fd, {&part, 1}, descriptors);
}

struct Got {
  pdx::Received received;
  std::string text;
};

Got receive(int fd, std::size_t descriptors_max = 4) {
  std::array<std::byte, 4096> buffer;
  pdx::Received received = pdx::receive_now(fd, buffer, descriptors_max);
  const auto* bytes = reinterpret_cast<const char*>(buffer.data());
  const std::size_t length = received.length > 0 ? static_cast<std::size_t>(received.length) : 0;
  return {std::move(received), std::string(bytes, length)};
}

void test_parts_are_one_write() {
  const Ends ends;
  std::string one = "left ", two = "right";
  const std::array<iovec, 2> parts{iovec{one.data(), one.size()}, iovec{two.data(), two.size()}};
  CHECK(pdx::send_now(ends.fds[0], parts, {}) == 10);
  CHECK(receive(ends.fds[1]).text == "left right");
}

void test_nothing_there_is_no_error() {
  Ends ends;
  CHECK(receive(ends.fds[1]).received.length == -1);
  close(ends.fds[0]);
  ends.fds[0] = -1;
  CHECK(receive(ends.fds[1]).received.length == 0);
}

void test_a_full_socket_says_so() {
  const Ends ends;
  const std::string much(64 << 10, 'x');
  std::ptrdiff_t sent = 0;
  for (int i = 0; i < 1000 && sent >= 0; ++i) sent = send(ends.fds[0], much);
  CHECK(sent == -1);
}

void test_a_socket_that_was_hung_up_throws() {
  Ends ends;
  close(ends.fds[0]);
  ends.fds[0] = -1;
  int error = 0;
  try {
    send(ends.fds[1], "x");
  } catch (const std::system_error& thrown) {
    error = thrown.code().value();
  }
  CHECK(error == EPIPE);
}

void test_descriptors_ride_with_the_first_byte() {
  const Ends ends;
  int pipes[2];
  CHECK(pipe(pipes) == 0);
  CHECK(send(ends.fds[0], "two", {pipes[0], pipes[1]}) == 3);
  const Got got = receive(ends.fds[1]);
  CHECK(got.text == "two" && !got.received.truncated && got.received.descriptors.size() == 2);
  CHECK(write(got.received.descriptors[1], "y", 1) == 1);
  char byte = 0;
  CHECK(read(pipes[0], &byte, 1) == 1 && byte == 'y');
  for (const int fd : got.received.descriptors) {
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    close(fd);
  }
  CHECK(send(ends.fds[0], "many", {pipes[0], pipes[0], pipes[0]}) == 4);
  const Got cut = receive(ends.fds[1], 1);
  CHECK(cut.received.truncated);
  for (const int fd : cut.received.descriptors) close(fd);
  close(pipes[0]);
  close(pipes[1]);
}

}  // namespace

int main() {
  test_parts_are_one_write();
  test_nothing_there_is_no_error();
  test_a_full_socket_says_so();
  test_a_socket_that_was_hung_up_throws();
  test_descriptors_ride_with_the_first_byte();
  return 0;
}
