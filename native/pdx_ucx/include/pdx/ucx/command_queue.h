// What other threads ask of the progress thread.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <unordered_set>

namespace pdx::ucx {

// Commands run on the progress thread in the order they were pushed.
//
// Threads: any, but `take`, `sleep`, `awake` on the progress thread. The eventfd is written only
// while that thread sleeps.
class CommandQueue {
 public:
  using Command = std::function<void()>;

  CommandQueue();
  ~CommandQueue();
  CommandQueue(const CommandQueue&) = delete;
  CommandQueue& operator=(const CommandQueue&) = delete;

  int fileno() const { return fd_; }
  // False: the queue is stopped, the command was not taken.
  bool push(Command command);
  // As `push`, and false too once the gate of this path is closed.
  bool push_for_path(std::uint64_t path, Command command);
  void open_gate(std::uint64_t path);
  // After this no command for the path is taken; those taken before are still run.
  void close_gate(std::uint64_t path);
  // No command is taken any more; those taken before are still run.
  void stop();

  std::deque<Command> take();
  // Says that the thread is about to sleep; false: there are commands, do not.
  bool sleep();
  void awake();

 private:
  bool push_locked(Command command);

  int fd_;
  std::atomic<bool> asleep_{false};
  std::mutex mutex_;
  std::deque<Command> commands_;
  std::unordered_set<std::uint64_t> open_paths_;
  bool stopped_ = false;
};

}  // namespace pdx::ucx
