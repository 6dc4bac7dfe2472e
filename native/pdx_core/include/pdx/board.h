// The status board: shared memory through which an agent tells a worker how each transfer stands.
//
// One header line, one line that tells whether the agent lives, then one 64-byte line per transfer.
// The agent maps the board writable and is its only writer; a worker maps it read-only. A line's
// word is `sequence << 8 | state`: the sequence numbers the uses of slots, so a word of an earlier
// or later use is never taken for this one. State 0 is a free slot; the other values are the
// agent's and mean nothing here.
//
// Order, also on machines that reorder loads and stores (ARM): a reader that sees the same word
// before and after reading the details has details of that word or newer ones of the same transfer,
// never those of another. It takes both directions. The word is stored (release) behind the details
// of its transfer and loaded (acquire) ahead of them: who sees the word sees them. And each detail
// is stored (release) behind the word that freed the slot, and loaded (acquire) ahead of the second
// look at the word: who sees a detail of the next transfer sees that the slot was freed.
#pragma once
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace pdx {

using Incarnation = std::array<std::uint8_t, 16>;

// What a line says beside its word.
struct BoardDetails {
  std::uint64_t room = 0;
  std::uint64_t generation = 0;
  Incarnation peer{};            // of one agent on the other side; zero: none yet
  std::uint32_t peer_count = 0;  // agents on the other side
  std::uint32_t lane = 0;        // the agent's code of the lane; 0: none yet
};

// A field of a line beside its word; it has no weaker order than the one above needs.
template <typename T>
class BoardField {
 public:
  T load() const { return value_.load(std::memory_order_acquire); }
  void store(T value) { value_.store(value, std::memory_order_release); }

 private:
  std::atomic<T> value_;
};

// As it lies in the shared memory.
struct alignas(64) BoardLine {
  std::atomic<std::uint64_t> word;
  BoardField<std::uint64_t> room;
  BoardField<std::uint64_t> generation;
  BoardField<std::uint64_t> peer[2];
  BoardField<std::uint64_t> bytes_done;
  BoardField<std::uint32_t> peer_count;
  BoardField<std::uint32_t> lane;
  BoardField<std::uint64_t> returned;  // prefill: what of the source pages is back, as it packs it
};
static_assert(sizeof(BoardLine) == 64);

// Whether the agent lives, for readers that may make no system call. The agent's thread holds a
// robust mutex: when that thread ends, for whatever reason, the kernel sets FUTEX_OWNER_DIED in the
// mutex's word, which is in memory that readers see. An agent that ends in order says so itself.
struct alignas(64) BoardLife {
  pthread_mutex_t held;
  std::atomic<std::uint32_t> ended;
};
static_assert(sizeof(BoardLife) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// Bytes of a board with `slots` lines.
constexpr std::size_t board_bytes(std::uint32_t slots) {
  return sizeof(BoardLine) * (static_cast<std::size_t>(slots) + 2);
}

// Set in a word that `BoardReader::word` returns once the agent has ended: nobody will change it.
constexpr std::uint64_t kOrphaned = 0x80;

constexpr std::uint64_t board_word(std::uint64_t sequence, std::uint8_t state) {
  return sequence << 8 | state;
}

// A mapping of a board's descriptor; unmapped by the destructor. The descriptor stays the caller's.
class BoardMapping {
 public:
  // Throws std::system_error with errno when the descriptor cannot be mapped, and with EINVAL when
  // its size is not `board_bytes(slots)`.
  BoardMapping(int fd, std::uint32_t slots, bool writable);
  ~BoardMapping();
  BoardMapping(const BoardMapping&) = delete;
  BoardMapping& operator=(const BoardMapping&) = delete;

  std::uint32_t slots() const { return slots_; }

 protected:
  // Throws std::out_of_range.
  BoardLine& line(std::uint32_t slot) const;
  BoardLine& header() const { return lines_[0]; }
  BoardLife& life() const { return *reinterpret_cast<BoardLife*>(&lines_[1]); }
  // The destructor leaves the mapping in place.
  void keep_mapped() { keep_mapped_ = true; }

 private:
  BoardLine* lines_;
  std::uint32_t slots_;
  bool keep_mapped_ = false;
};

// The agent's side. One thread at a time.
class BoardWriter : public BoardMapping {
 public:
  // Writes the header. The descriptor must be writable: F_SEAL_FUTURE_WRITE comes after this.
  // Readers take the end of the calling thread for the end of the agent.
  BoardWriter(int fd, std::uint32_t slots, const Incarnation& incarnation);
  // On another thread than the constructor's, and not after `end` there, it leaves the board
  // mapped: that thread's list of held mutexes goes through it.
  ~BoardWriter();

  // Tells readers that this agent writes no more. Idempotent.
  void end();

  void set_details(std::uint32_t slot, const BoardDetails& details);
  void set_bytes_done(std::uint32_t slot, std::uint64_t bytes);
  void set_returned(std::uint32_t slot, std::uint64_t packed);
  // Stores the word (release) and wakes every waiter on it. `sequence` has 56 bits.
  void publish(std::uint32_t slot, std::uint64_t sequence, std::uint8_t state);

 private:
  const std::thread::id maker_ = std::this_thread::get_id();
  bool held_ = true;
};

// The worker's side. Any thread.
class BoardReader : public BoardMapping {
 public:
  // Throws std::system_error (EINVAL) when the memory is not a board of this version and size.
  BoardReader(int fd, std::uint32_t slots);

  Incarnation incarnation() const;
  // Whether the agent has ended: a memory read.
  bool ended() const;
  // The word of a slot, with `kOrphaned` once the agent has ended: then it is the last one.
  std::uint64_t word(std::uint32_t slot) const;
  BoardDetails details(std::uint32_t slot) const;
  std::uint64_t bytes_done(std::uint32_t slot) const;
  std::uint64_t returned(std::uint32_t slot) const;
  // Blocks until the word of `slot` differs from `seen` or `timeout_ns` has passed; returns the
  // word it then has. A negative timeout waits without end. Signals do not cut the wait short
  // unless `interrupted` is given and returns true.
  std::uint64_t wait(std::uint32_t slot, std::uint64_t seen, std::int64_t timeout_ns,
                     bool (*interrupted)() = nullptr) const;
};

}  // namespace pdx
