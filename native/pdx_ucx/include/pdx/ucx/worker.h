// A UCX worker with its descriptor: what sends or receives on one connection.
#pragma once
#include <ucp/api/ucp.h>

#include <cstdint>
#include <string>

#include "pdx/ucx/worker_address.h"

namespace pdx::ucx {

class Context;
class WorkerSet;

// Threads: the progress thread only.
class Worker {
 public:
  // It belongs to the set while it lives.
  // Raises: ResourceError with the UCX status, when no descriptor is left, or when this UCX writes
  // addresses that are not understood here.
  Worker(const Context& context, WorkerSet& set);
  // Destroys the worker and every endpoint on it; what was in flight ends here with its callbacks.
  // When this returns, no write that comes over a connection of this worker (tcp) can land any
  // more, and none is made from this process's memory.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  ucp_worker_h handle() const { return handle_; }
  int fileno() const { return fd_; }
  const std::string& address() const { return address_; }
  // Makes an endpoint to the worker that is called `address`, which may come from anyone; `params`
  // has everything else. nullptr and a text in `problem` when the address is refused or UCX cannot.
  ucp_ep_h connect(const std::string& address, ucp_ep_params_t params, std::string& problem);

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
  void learn_descriptor_and_address(const Context& context);

  WorkerSet& set_;
  ucp_worker_h handle_ = nullptr;
  int fd_ = -1;
  std::string address_;
  WorkerAddress parsed_;
};

// Force closes an endpoint whose worker is destroyed next, without progress in between. UCX 1.22
// goes on receiving on a forced tcp connection that both sides had opened; its event handler then
// works on freed memory when the peer ends it. So the connection has to end with the endpoint.
void close_with_worker(ucp_ep_h endpoint);

}  // namespace pdx::ucx
