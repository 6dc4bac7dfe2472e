// The status board: two mappings of one memory, order between details and word, waits that end.
#include <fcntl.h>
#include <linux/memfd.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "check.h"
#include "pdx/board.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace {

using pdx::board_bytes;
using pdx::board_word;
using pdx::BoardDetails;
using pdx::BoardReader;
using pdx::BoardWriter;
using pdx::Incarnation;

constexpr std::uint32_t kSlots = 4;
constexpr std::int64_t kNever = -1;
constexpr std::int64_t kMillisecond = 1'000'000;

Incarnation incarnation(std::uint8_t first) {
  Incarnation value;
  for (std::size_t i = 0; i < value.size(); ++i) value[i] = static_cast<std::uint8_t>(first + i);
  return value;
}

// A memfd of the size of a board, closed at the end.
class File {
 public:
  explicit File(std::size_t bytes = board_bytes(kSlots))
      : fd(memfd_create("board", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    CHECK(fd >= 0);
    CHECK(ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  }
  ~File() { close(fd); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const int fd;
};

struct Board {
  File file;
  BoardWriter writer{file.fd, kSlots, incarnation(1)};
  BoardReader reader{file.fd, kSlots};
};

int error_of(int fd, std::uint32_t slots, bool writable) {
  try {
    if (writable) {
      BoardWriter{fd, slots, incarnation(1)};
    } else {
      BoardReader{fd, slots};
    }
  } catch (const std::system_error& error) {
    return error.code().value();
  }
  return 0;
}

void test_words_and_details_cross() {
  Board board;
  CHECK(board.reader.incarnation() == incarnation(1));
  CHECK(board.reader.word(0) == 0);
  const BoardDetails details{~0ull, 7, incarnation(40), 3, 4};
  board.writer.set_details(2, details);
  board.writer.set_bytes_done(2, 1ull << 50);
  board.writer.publish(2, (1ull << 56) - 1, 8);
  CHECK(board.reader.word(2) == (((1ull << 56) - 1) << 8 | 8));
  const BoardDetails seen = board.reader.details(2);
  CHECK(seen.room == details.room && seen.generation == details.generation);
  CHECK(seen.peer == details.peer && seen.peer_count == 3 && seen.lane == 4);
  CHECK(board.reader.bytes_done(2) == 1ull << 50);
  CHECK(board.reader.word(1) == 0 && board.reader.word(3) == 0);
  CHECK(board.reader.details(1).room == 0 && board.reader.details(3).room == 0);
}

void test_slots_are_bounded() {
  Board board;
  CHECK_THROWS(std::out_of_range, board.reader.word(kSlots));
  CHECK_THROWS(std::out_of_range, board.reader.details(kSlots));
  CHECK_THROWS(std::out_of_range, board.reader.wait(kSlots, 0, 0));
  CHECK_THROWS(std::out_of_range, board.writer.publish(kSlots, 1, 1));
  CHECK_THROWS(std::out_of_range, board.writer.set_details(~0u, {}));
}

void test_what_is_no_board_is_refused() {
  const File empty;
  CHECK(error_of(empty.fd, kSlots, false) == EINVAL);
  CHECK(error_of(empty.fd, kSlots + 1, false) == EINVAL);
  CHECK(error_of(-1, kSlots, true) == EBADF);
  const Board board;
  CHECK(error_of(board.file.fd, kSlots - 1, false) == EINVAL);
  CHECK(error_of(board.file.fd, kSlots, false) == 0);
}

void test_a_worker_cannot_write() {
  Board board;
  CHECK(fcntl(board.file.fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0);
  CHECK(error_of(board.file.fd, kSlots, true) == EPERM);
  board.writer.publish(0, 1, 1);  // the mapping from before the seal goes on
  const BoardReader later{board.file.fd, kSlots};
  CHECK(later.word(0) == board_word(1, 1));
}

// Details are of the word's transfer or a newer one whenever the word has not changed in between.
void test_details_come_before_their_word() {
  Board board;
  constexpr std::uint64_t kUses = 200'000;
  std::thread agent([&] {
    for (std::uint64_t use = 1; use <= kUses; ++use) {
      board.writer.set_details(0, {use, use, incarnation(0), 1, 1});
      board.writer.publish(0, use, 1);
    }
  });
  std::uint64_t sequence = 0;
  while (sequence < kUses) {
    sequence = board.reader.word(0) >> 8;
    CHECK(board.reader.details(0).generation >= sequence);
  }
  agent.join();
}

// A slot is freed, filled for its next transfer, and shown: while the word stays the same, the
// details are never those of another transfer. (A machine that reorders is needed to fail here.)
void test_details_of_the_next_use_come_behind_the_word_that_freed_the_slot() {
  Board board;
  constexpr std::uint64_t kUses = 200'000;
  std::thread agent([&] {
    for (std::uint64_t use = 1; use <= kUses; ++use) {
      board.writer.set_details(0, {use, use, incarnation(0), 1, 1});
      board.writer.set_bytes_done(0, use);
      board.writer.publish(0, use, 1);
      board.writer.publish(0, use, 0);
    }
  });
  for (std::uint64_t before = 0; before >> 8 < kUses;) {
    before = board.reader.word(0);
    const BoardDetails details = board.reader.details(0);
    const std::uint64_t bytes_done = board.reader.bytes_done(0);
    if ((before & 0x7f) == 1 && board.reader.word(0) == before) {
      CHECK(details.room == before >> 8 && details.generation == before >> 8);
      CHECK(bytes_done == before >> 8);
    }
  }
  agent.join();
}

void test_wait_ends_at_its_deadline() {
  Board board;
  const auto before = std::chrono::steady_clock::now();
  CHECK(board.reader.wait(0, 0, 5 * kMillisecond) == 0);
  CHECK(std::chrono::steady_clock::now() - before >= std::chrono::milliseconds(5));
  CHECK(board.reader.wait(0, 0, 0) == 0);
  CHECK(board.reader.wait(0, board_word(1, 1), kNever) == 0);  // differs already
}

void test_wait_is_woken_by_the_word_it_waits_for() {
  Board board;
  board.writer.publish(0, 1, 1);
  std::thread agent([&] {
    board.writer.publish(1, 9, 9);
    board.writer.publish(0, 1, 1);  // the same word again: no reason to return
    board.writer.publish(0, 1, 5);
  });
  CHECK(board.reader.wait(0, board_word(1, 1), kNever) == board_word(1, 5));
  agent.join();
}

void test_every_waiter_is_woken() {
  Board board;
  std::atomic<int> woken{0};
  std::thread waiters[4];
  for (std::thread& waiter : waiters) {
    waiter = std::thread([&] {
      CHECK(board.reader.wait(3, 0, kNever) == board_word(1, 2));
      ++woken;
    });
  }
  board.writer.publish(3, 1, 2);
  for (std::thread& waiter : waiters) waiter.join();
  CHECK(woken == 4);
}

void test_wait_in_another_process_is_woken() {
  Board board;
  const pid_t child = fork();
  if (child == 0) {
    // A mapping of its own, as a worker has: read-only, at another address.
    const BoardReader reader{board.file.fd, kSlots};
    _exit(reader.wait(0, 0, 20'000 * kMillisecond) == board_word(1, 5) ? 0 : 1);
  }
  board.writer.publish(0, 1, 5);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void await_end(const BoardReader& reader) {
  for (int i = 0; i < 20'000 && !reader.ended(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(reader.ended());
}

// However the agent's process ends, its board says so, and shows the last word it wrote.
void test_the_end_of_the_agents_process_is_seen() {
  for (const int how : {SIGKILL, SIGTERM, 0}) {
    const File file;
    int told[2];
    CHECK(pipe(told) == 0);
    const pid_t agent = fork();
    if (agent == 0) {
      BoardWriter writer{file.fd, kSlots, incarnation(1)};
      writer.publish(1, 3, 2);
      CHECK(write(told[1], "x", 1) == 1);
      if (how == 0) _exit(0);
      pause();
    }
    char byte = 0;
    CHECK(read(told[0], &byte, 1) == 1);
    const BoardReader reader{file.fd, kSlots};
    if (how != 0) {
      CHECK(!reader.ended() && reader.word(1) == board_word(3, 2));
      CHECK(kill(agent, how) == 0);
    }
    await_end(reader);
    CHECK(reader.word(1) == (board_word(3, 2) | pdx::kOrphaned));
    CHECK(waitpid(agent, nullptr, 0) == agent);
    close(told[0]);
    close(told[1]);
  }
}

void test_the_end_of_the_agents_thread_is_seen() {
  const File file;
  std::unique_ptr<BoardWriter> writer;
  std::thread([&] {
    writer = std::make_unique<BoardWriter>(file.fd, kSlots, incarnation(1));
  }).join();
  await_end(BoardReader{file.fd, kSlots});
}

void test_a_fork_of_the_agent_may_come_and_go() {
  const Board board;
  const pid_t child = fork();
  if (child == 0) {
    const_cast<Board&>(board).~Board();
    _exit(0);
  }
  CHECK(waitpid(child, nullptr, 0) == child);
  CHECK(!board.reader.ended());
}

void test_an_end_in_order_is_seen() {
  Board board;
  CHECK(!board.reader.ended());
  board.writer.end();
  CHECK(board.reader.ended());
}

std::atomic<int> signals{0};
std::atomic<bool> give_up{false};

void test_signals_do_not_cut_a_wait_short() {
  Board board;
  struct sigaction action{};
  action.sa_handler = [](int) { ++signals; };  // no SA_RESTART: the system call returns EINTR
  CHECK(sigaction(SIGUSR1, &action, nullptr) == 0);
  for (const bool ends : {false, true}) {
    signals = 0;
    give_up = ends;
    board.writer.publish(0, ends ? 2 : 1, 1);
    const std::uint64_t seen = board.reader.word(0);
    std::atomic<bool> done{false};
    const pthread_t waiter = pthread_self();
    std::thread sender([&] {
      while (!done && (ends || signals < 20)) {
        pthread_kill(waiter, SIGUSR1);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      if (!ends) board.writer.publish(0, 1, 7);
    });
    const std::uint64_t word = board.reader.wait(0, seen, kNever, [] { return give_up.load(); });
    done = true;
    sender.join();
    CHECK(word == (ends ? seen : board_word(1, 7)));
    CHECK(ends || signals == 20);
  }
}

}  // namespace

int main() {
  test_words_and_details_cross();
  test_slots_are_bounded();
  test_what_is_no_board_is_refused();
  test_a_worker_cannot_write();
  test_details_come_before_their_word();
  test_details_of_the_next_use_come_behind_the_word_that_freed_the_slot();
  test_wait_ends_at_its_deadline();
  test_wait_is_woken_by_the_word_it_waits_for();
  test_every_waiter_is_woken();
  test_wait_in_another_process_is_woken();
  test_the_end_of_the_agents_process_is_seen();
  test_the_end_of_the_agents_thread_is_seen();
  test_a_fork_of_the_agent_may_come_and_go();
  test_an_end_in_order_is_seen();
  test_signals_do_not_cut_a_wait_short();
  return 0;
}
