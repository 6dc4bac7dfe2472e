#include "pdx/board.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <system_error>

namespace pdx {
namespace {

constexpr std::uint64_t kMagic = 0x3244524144425850;  // "PXBDARD2"
static_assert(std::endian::native == std::endian::little,
              "the futex looks at the low half of the word, which must come first");

[[noreturn]] void throw_errno(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

std::uint32_t* futex_address(const BoardLine& line) {
  return reinterpret_cast<std::uint32_t*>(const_cast<std::atomic<std::uint64_t>*>(&line.word));
}

std::int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// The word of a mutex that the kernel marks when its holder dies: glibc keeps it in front.
const std::uint32_t* futex_word(const pthread_mutex_t& mutex) {
#ifdef __GLIBC__
  static_assert(offsetof(pthread_mutex_t, __data.__lock) == 0);
#endif
  return reinterpret_cast<const std::uint32_t*>(&mutex);
}

// Makes a robust mutex in shared memory and takes it for the calling thread.
void hold(pthread_mutex_t& mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int made = pthread_mutex_init(&mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (made != 0) throw_errno(made, "a robust mutex on the status board");
  const int taken = pthread_mutex_lock(&mutex);
  if (taken != 0) throw_errno(taken, "the robust mutex on the status board");
}

// Sleeps until woken, `deadline_ns` (CLOCK_MONOTONIC, negative: none) or a signal. Returns errno.
int futex_wait(std::uint32_t* address, std::uint32_t expected, std::int64_t deadline_ns) {
  timespec until{};
  if (deadline_ns >= 0) {
    until.tv_sec = static_cast<time_t>(deadline_ns / 1'000'000'000);
    until.tv_nsec = static_cast<long>(deadline_ns % 1'000'000'000);
  }
  // FUTEX_WAIT_BITSET takes an absolute time, so that a spurious wake does not extend the wait. Not
  // FUTEX_PRIVATE_FLAG: waiter and waker are two processes, and the key is the file's page.
  const long result =
      syscall(SYS_futex, address, FUTEX_WAIT_BITSET, expected, deadline_ns >= 0 ? &until : nullptr,
              nullptr, static_cast<unsigned>(FUTEX_BITSET_MATCH_ANY));
  return result == 0 ? 0 : errno;
}

}  // namespace

BoardMapping::BoardMapping(int fd, std::uint32_t slots, bool writable) : slots_(slots) {
  struct stat status{};
  if (fstat(fd, &status) != 0) throw_errno(errno, "fstat of the status board");
  if (status.st_size != static_cast<off_t>(board_bytes(slots))) {
    throw_errno(EINVAL, "the status board has another size than its slots need");
  }
  void* base = mmap(nullptr, board_bytes(slots), writable ? PROT_READ | PROT_WRITE : PROT_READ,
                    MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw_errno(errno, "mmap of the status board");
  lines_ = static_cast<BoardLine*>(base);
}

BoardMapping::~BoardMapping() {
  if (!keep_mapped_) munmap(static_cast<void*>(lines_), board_bytes(slots_));
}

BoardLine& BoardMapping::line(std::uint32_t slot) const {
  if (slot >= slots_) throw std::out_of_range("status board slot out of range");
  return lines_[static_cast<std::size_t>(slot) + 2];
}

BoardWriter::BoardWriter(int fd, std::uint32_t slots, const Incarnation& incarnation)
    : BoardMapping(fd, slots, true) {
  const auto halves = std::bit_cast<std::array<std::uint64_t, 2>>(incarnation);
  BoardLine& first = header();
  first.peer[0].store(halves[0]);
  first.peer[1].store(halves[1]);
  first.room.store(slots);
  hold(life().held);
  first.word.store(kMagic, std::memory_order_release);
}

BoardWriter::~BoardWriter() {
  if (!held_) return;
  // Fails with EPERM in a fork of the process that holds it.
  if (maker_ == std::this_thread::get_id() && pthread_mutex_unlock(&life().held) == 0) {
    life().ended.store(1, std::memory_order_release);
  } else {
    keep_mapped();
  }
}

void BoardWriter::end() {
  life().ended.store(1, std::memory_order_release);
  if (held_ && maker_ == std::this_thread::get_id() && pthread_mutex_unlock(&life().held) == 0) {
    held_ = false;
  }
}

void BoardWriter::set_details(std::uint32_t slot, const BoardDetails& details) {
  const auto halves = std::bit_cast<std::array<std::uint64_t, 2>>(details.peer);
  BoardLine& target = line(slot);
  target.room.store(details.room);
  target.generation.store(details.generation);
  target.peer[0].store(halves[0]);
  target.peer[1].store(halves[1]);
  target.peer_count.store(details.peer_count);
  target.lane.store(details.lane);
}

void BoardWriter::set_bytes_done(std::uint32_t slot, std::uint64_t bytes) {
  line(slot).bytes_done.store(bytes);
}

void BoardWriter::set_returned(std::uint32_t slot, std::uint64_t packed) {
  line(slot).returned.store(packed);
}

void BoardWriter::publish(std::uint32_t slot, std::uint64_t sequence, std::uint8_t state) {
  BoardLine& target = line(slot);
  target.word.store(board_word(sequence, state), std::memory_order_release);
  syscall(SYS_futex, futex_address(target), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

BoardReader::BoardReader(int fd, std::uint32_t slots) : BoardMapping(fd, slots, false) {
  if (header().word.load(std::memory_order_acquire) != kMagic || header().room.load() != slots) {
    throw_errno(EINVAL, "the memory is not a status board of this version");
  }
}

Incarnation BoardReader::incarnation() const {
  const std::array<std::uint64_t, 2> halves{header().peer[0].load(), header().peer[1].load()};
  return std::bit_cast<Incarnation>(halves);
}

bool BoardReader::ended() const {
  const BoardLife& agent = life();
  return (__atomic_load_n(futex_word(agent.held), __ATOMIC_ACQUIRE) & FUTEX_OWNER_DIED) != 0 ||
         agent.ended.load(std::memory_order_acquire) != 0;
}

std::uint64_t BoardReader::word(std::uint32_t slot) const {
  const BoardLine& source = line(slot);
  const std::uint64_t now = source.word.load(std::memory_order_acquire);
  // Read again: the agent may have written it between the first read and its end.
  return ended() ? source.word.load(std::memory_order_acquire) | kOrphaned : now;
}

BoardDetails BoardReader::details(std::uint32_t slot) const {
  const BoardLine& source = line(slot);
  BoardDetails details;
  details.room = source.room.load();
  details.generation = source.generation.load();
  const std::array<std::uint64_t, 2> halves{source.peer[0].load(), source.peer[1].load()};
  details.peer = std::bit_cast<Incarnation>(halves);
  details.peer_count = source.peer_count.load();
  details.lane = source.lane.load();
  return details;
}

std::uint64_t BoardReader::bytes_done(std::uint32_t slot) const {
  return line(slot).bytes_done.load();
}

std::uint64_t BoardReader::returned(std::uint32_t slot) const { return line(slot).returned.load(); }

std::uint64_t BoardReader::wait(std::uint32_t slot, std::uint64_t seen, std::int64_t timeout_ns,
                                bool (*interrupted)()) const {
  const BoardLine& source = line(slot);
  const std::int64_t deadline_ns = timeout_ns < 0 ? -1 : monotonic_ns() + timeout_ns;
  for (;;) {
    const std::uint64_t now = source.word.load(std::memory_order_acquire);
    if (now != seen) return now;
    const int error =
        futex_wait(futex_address(source), static_cast<std::uint32_t>(seen), deadline_ns);
    if (error == ETIMEDOUT) return source.word.load(std::memory_order_acquire);
    if (error == EINTR && interrupted != nullptr && interrupted()) return seen;
    if (error != 0 && error != EAGAIN && error != EINTR) throw_errno(error, "futex wait");
    // Equal low halves with different words would need 2^24 uses of slots during one wait.
  }
}

}  // namespace pdx
