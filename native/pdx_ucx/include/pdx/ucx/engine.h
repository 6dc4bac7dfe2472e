// The UCX data plane of one agent and lane, as other threads see it.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "pdx/ucx/progress.h"

namespace pdx::ucx {

// A registered range as its owner and its peers know it.
struct RegionInfo {
  std::uint64_t id;
  std::string rkey;
};

// One context, one progress thread, one worker per path and one per sender.
//
// Threads: any, several at once. Calls queue work and return, except those said to wait, which wait
// for the progress thread at most kCallTimeoutS. Ends are told by `drain`; `fileno` says when.
// Every call throws UsageError in a child process made by fork and after `close`.
class Engine {
 public:
  // How long a call that waits for the progress thread waits.
  static constexpr double kCallTimeoutS = 10.0;
  // How long what is in flight on a path may go on after `close_path`.
  static constexpr double kLeaveS = 0.5;

  // Starts UCX; waits.
  // Throws: SettingError, ResourceError; nothing is left behind.
  explicit Engine(EngineOptions options);
  // Closes with a deadline of 5 s unless closed; in a forked child it only forgets.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int fileno() const;
  // Also after `close`.
  std::vector<Completion> drain();
  // True when `drain` has something within timeout_s.
  bool wait(double timeout_s) const;

  // Waits. The memory must stay mapped until RegionReleased or the end of `close`.
  RegionInfo register_region(Range range);
  // RegionReleased follows when no batch uses the region any more.
  void deregister_region(std::uint64_t id);

  // What a receiver knows this sender by.
  const std::string& send_address() const { return send_address_; }
  // PathOpened follows, at the latest after timeout_s. Throws UsageError for a bad address.
  std::uint64_t connect(const std::string& address, double timeout_s);
  // Ticket of the first batch; the others count up from it. `source` are region ids.
  // Throws UsageError when the path is closed, a run leaves its region or a remote key is none of
  // this lane: then nothing is posted.
  std::uint64_t post(std::uint64_t path, std::uint64_t generation, const RunTable& runs,
                     std::span<const std::uint64_t> source, std::vector<RemoteRange> destination);
  // Ticket. Throws UsageError when the path is closed or the payload is too long.
  std::uint64_t commit(std::uint64_t path, std::uint64_t generation, std::string payload);
  // Cancelled follows, or PathClosed. deadline_s 0: none; else the path is closed after it.
  void cancel(std::uint64_t path, std::uint64_t generation, double deadline_s);
  // Drops what is not posted and gives the rest kLeaveS to land; then the path is forced.
  // PathClosed follows. Idempotent.
  void close_path(std::uint64_t path);

  // Waits. Number and address of the new receiver.
  std::pair<std::uint64_t, std::string> open_receiver();
  // Says which sender has to connect. From its PathOpened on, its end is told as SenderLost, with
  // or without this call. Throws UsageError for a bad address.
  void watch_sender(std::uint64_t receiver, const std::string& address);
  // Waits: the worker is destroyed on return. Idempotent.
  void close_receiver(std::uint64_t receiver);

  // Drains for half of deadline_s, then forces. Idempotent.
  // Throws: ResourceError when the thread has not ended in time; everything is kept alive then.
  void close(double deadline_s);

 private:
  void require_usable() const;
  void require_process() const;
  void call(std::function<void()> work);
  void start_thread();

  const pid_t process_;
  std::shared_ptr<Progress> progress_;
  struct Shared;
  std::shared_ptr<Shared> shared_;
  std::string send_address_;
  // One of our remote keys.
  std::string rkey_;
  std::atomic<std::uint64_t> next_id_{1};
  std::atomic<std::uint64_t> next_ticket_{1};
};

}  // namespace pdx::ucx
