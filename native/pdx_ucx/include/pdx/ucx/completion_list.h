// What the engine tells its owner: a list of ended things and one descriptor that says "not empty".
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace pdx::ucx {

enum class Event : std::uint8_t {
  PathOpened = 1,
  Posted = 2,
  CommitSent = 3,
  Cancelled = 4,
  PathClosed = 5,
  CommitArrived = 6,
  SenderLost = 7,
  RegionReleased = 8,
};

// One thing that ended. Fields that an event does not use are zero or empty.
struct Completion {
  Event event;
  // Path, receiver or region, as the engine numbered it.
  std::uint64_t id = 0;
  std::uint64_t generation = 0;
  std::uint64_t ticket = 0;
  std::uint64_t length_bytes = 0;
  std::uint64_t runs = 0;
  // PathClosed: no write was in flight when the path was closed.
  bool drained = false;
  // Transports of PathOpened, payload of CommitArrived.
  std::string data;
  // Empty: success.
  std::string error;
};

// Threads: any. The descriptor is an eventfd, written once per change from empty to not empty.
class CompletionList {
 public:
  CompletionList();
  ~CompletionList();
  CompletionList(const CompletionList&) = delete;
  CompletionList& operator=(const CompletionList&) = delete;

  int fileno() const { return fd_; }
  void push(Completion completion);
  // Everything since the last call, in order; the descriptor is not readable afterwards.
  std::vector<Completion> drain();
  // True when something is there within timeout_s.
  bool wait(double timeout_s) const;

 private:
  int fd_;
  std::mutex mutex_;
  std::vector<Completion> list_;
};

}  // namespace pdx::ucx
