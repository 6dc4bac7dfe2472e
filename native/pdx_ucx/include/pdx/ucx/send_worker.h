// The one worker that writes, and its endpoints.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "pdx/ucx/endpoint.h"
#include "pdx/ucx/worker.h"

namespace pdx::ucx {

// Threads: the progress thread only.
class SendWorker {
 public:
  SendWorker(const Context& context, CommandQueue& commands, CompletionList& completions,
             const Window& window, std::string rkey);

  Worker& worker() { return worker_; }
  // What decode's endpoint connects to.
  const std::string& address() const { return address_; }

  void connect(std::uint64_t path, const LaneAddress& address, std::uint64_t deadline_ns);
  // nullptr: that path is gone.
  SendEndpoint* find(std::uint64_t path);
  // One quantum for each endpoint that has work and room; true when anything was posted.
  bool pump();
  void housekeep(std::uint64_t now_ns, std::uint64_t turn);

  // Ends of an engine: drop what is not posted, see whether the rest is done, force.
  void drop_all(const std::string& reason);
  bool busy() const;
  // True when an endpoint is in a state that ends by itself within a few turns.
  bool settling() const;
  void close_all(const std::string& reason);
  bool empty() const { return endpoints_.empty(); }

 private:
  static ucs_status_t on_welcome(void* sender, const void* header, std::size_t header_length,
                                 void* data, std::size_t length, const ucp_am_recv_param_t* param);

  const Context& context_;
  CommandQueue& commands_;
  CompletionList& completions_;
  const Window window_;
  // Source of the first write of every path.
  const std::string probe_bytes_;
  // One of our remote keys.
  const std::string rkey_;
  Worker worker_;
  std::string address_;
  std::map<std::uint64_t, std::unique_ptr<SendEndpoint>> endpoints_;
};

}  // namespace pdx::ucx
