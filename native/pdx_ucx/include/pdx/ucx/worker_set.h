// The UCX workers of an engine, and what its thread sleeps on.
#pragma once
#include <cstdint>
#include <vector>

namespace pdx::ucx {

class Worker;

// Threads: the progress thread only.
class WorkerSet {
 public:
  // `command_fd` ends a sleep too. Nothing is to do for a time of `spin_us` before a worker sleeps.
  // Throws: ResourceError when there is no descriptor left.
  WorkerSet(int command_fd, double spin_us);
  ~WorkerSet();
  WorkerSet(const WorkerSet&) = delete;
  WorkerSet& operator=(const WorkerSet&) = delete;

  // Throws: ResourceError when its descriptor cannot be listened to.
  void add(Worker& worker);
  void remove(Worker& worker);
  // Handles what is ready on any worker; true when there was something.
  bool progress(std::uint64_t now_ns);
  // True when each worker will end a `wait` at its next event.
  bool armed() const;
  // Waits for an event of a worker or a command.
  void wait(int timeout_ms);

 private:
  bool progress(Worker& worker, std::uint64_t now_ns) const;

  const std::uint64_t spin_ns_;
  int epoll_;
  std::vector<Worker*> workers_;
};

}  // namespace pdx::ucx
