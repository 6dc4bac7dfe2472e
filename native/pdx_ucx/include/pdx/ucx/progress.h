// The thread that makes every UCX call of an engine.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "pdx/ucx/clock.h"
#include "pdx/ucx/command_queue.h"
#include "pdx/ucx/completion_list.h"
#include "pdx/ucx/context.h"
#include "pdx/ucx/receive_worker.h"
#include "pdx/ucx/send_paths.h"
#include "pdx/ucx/worker_set.h"

namespace pdx::ucx {

struct EngineOptions {
  LaneSettings lane;
  Window window;
  // How long the thread spins after its last event before it sleeps.
  double spin_us = 30.0;
  std::uint64_t commit_bytes_max = 68 << 10;
  // How long a sender may take to connect after `watch_sender`.
  double watch_timeout_s = 10.0;
};

// Owns all UCX objects. Started by `run` on a thread of its own, which never touches Python and
// never throws; what fails there ends the paths and receivers with that error.
//
// Threads: `run` is the progress thread; methods marked so are called there, by commands.
class Progress {
 public:
  explicit Progress(EngineOptions options);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  CommandQueue& commands() { return commands_; }
  CompletionList& completions() { return completions_; }
  RegionTable& regions() { return regions_; }
  const EngineOptions& options() const { return options_; }

  // The body of the thread: starts UCX, tells `started` (empty: success), works until stopped.
  void run(const std::function<void(const std::exception_ptr&)>& started);

  // -- progress thread only
  std::shared_ptr<const Context> context() const { return context_; }
  // One of our remote keys; those of peers look alike.
  const std::string& rkey() const { return probe_->rkey(); }
  SendPaths& paths() { return *paths_; }
  // Address of the new receiver.
  std::string open_receiver(std::uint64_t id);
  void watch_sender(std::uint64_t id, const std::string& address);
  // The worker is destroyed when this returns.
  void close_receiver(std::uint64_t id);
  // Drains until `drain_deadline_ns`, then forces; `run` returns after that.
  void begin_stop(std::uint64_t drain_deadline_ns);

 private:
  void start();
  void turn();
  bool run_commands();
  void housekeep(std::uint64_t now);
  void lose_senders(std::uint64_t now);
  bool sleep_allowed() const;
  void stop_step(std::uint64_t now);
  void shut_down() noexcept;

  const EngineOptions options_;
  CommandQueue commands_;
  CompletionList completions_;
  RegionTable regions_;
  WorkerSet workers_;

  std::shared_ptr<const Context> context_;
  // Receives the first write of every path; nobody reads it.
  std::string probe_target_;
  std::unique_ptr<Region> probe_;
  std::unique_ptr<SendPaths> paths_;
  std::map<std::uint64_t, std::unique_ptr<ReceiveWorker>> receivers_;

  std::uint64_t turns_ = 0;
  bool stopping_ = false;
  bool forced_ = false;
  bool stopped_ = false;
  std::uint64_t drain_deadline_ns_ = 0;
};

}  // namespace pdx::ucx
