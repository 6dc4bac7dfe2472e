// The paths of an engine to its receivers.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "pdx/ucx/endpoint.h"

namespace pdx::ucx {

// Threads: the progress thread only.
class SendPaths {
 public:
  // `rkey` is one of our remote keys.
  SendPaths(const Context& context, WorkerSet& workers, CommandQueue& commands,
            CompletionList& completions, const Window& window, std::string rkey);

  // What this sender calls itself: a lane address that nobody connects to. The hello of each path
  // carries it, so that decode knows whose path it is.
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
  const Context& context_;
  WorkerSet& workers_;
  CommandQueue& commands_;
  CompletionList& completions_;
  const Window window_;
  // Source of the first write of every path.
  const std::string probe_bytes_;
  const std::string rkey_;
  const std::string address_;
  std::map<std::uint64_t, std::unique_ptr<SendEndpoint>> endpoints_;
};

}  // namespace pdx::ucx
