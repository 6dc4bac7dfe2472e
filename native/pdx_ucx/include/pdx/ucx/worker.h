// A UCX worker with its descriptor: what sends and receives on one lane.
#pragma once
#include <ucp/api/ucp.h>

#include <cstdint>
#include <string>

namespace pdx::ucx {

class Context;

// Threads: the progress thread only.
class Worker {
 public:
  explicit Worker(const Context& context);
  // Destroys the worker and every endpoint on it. When this returns, no write that comes over a
  // connection of this worker (tcp) can land any more.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  ucp_worker_h handle() const { return handle_; }
  int fileno() const { return fd_; }
  const std::string& address() const { return address_; }

  // Calls `handler` with `argument` for each whole message `id`.
  void on_message(unsigned id, ucp_am_recv_callback_t handler, void* argument);
  // Handles what is ready; true when there was something.
  bool progress();
  // True when the worker will make `fileno` readable at its next event.
  bool arm();
  // Something was posted, or the descriptor became readable: progress it again.
  void wake(std::uint64_t now_ns);

  bool armed = false;
  std::uint64_t last_event_ns = 0;

 private:
  ucp_worker_h handle_ = nullptr;
  int fd_ = -1;
  std::string address_;
};

}  // namespace pdx::ucx
