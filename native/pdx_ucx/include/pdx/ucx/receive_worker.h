// What one sender incarnation may reach: a worker of its own, so that destroying it cuts off that
// sender and no other.
#pragma once
#include <ucp/api/ucp.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "pdx/ucx/completion_list.h"
#include "pdx/ucx/lane_address.h"
#include "pdx/ucx/worker.h"

namespace pdx::ucx {

// Threads: the progress thread only. The owner destroys it once `lost` is not empty and reports
// SenderLost after that: on tcp, destruction is the proof that nothing more lands.
class ReceiveWorker {
 public:
  struct Limits {
    std::uint64_t commit_bytes_max;
  };

  ReceiveWorker(std::uint64_t id, const Context& context, WorkerSet& workers,
                CompletionList& completions, Limits limits);
  ~ReceiveWorker();
  ReceiveWorker(const ReceiveWorker&) = delete;
  ReceiveWorker& operator=(const ReceiveWorker&) = delete;

  const Worker& worker() const { return *worker_; }
  std::uint64_t id() const { return id_; }
  // Says which sender has to come, and until when. Our own endpoint to it is opened when its hello
  // comes, never while a write may be under way. Another sender, or none in time, is a lost one; so
  // is one that comes with a second path.
  void expect(std::string sender_address, std::uint64_t deadline_ns);
  void housekeep(std::uint64_t now_ns);
  // Why the sender is lost; empty while it is not.
  const std::string& lost() const { return lost_; }

 private:
  static ucs_status_t on_commit(void* receiver, const void* header, std::size_t header_length,
                                void* data, std::size_t length, const ucp_am_recv_param_t* param);
  static ucs_status_t on_hello(void* receiver, const void* header, std::size_t header_length,
                               void* data, std::size_t length, const ucp_am_recv_param_t* param);
  static void on_welcomed(void* request, ucs_status_t status, void* receiver);
  static void on_error(void* receiver, ucp_ep_h handle, ucs_status_t status);

  void greet(const std::string& hello);
  void welcome(std::uint64_t path, const LaneAddress& worker);
  void watch(const LaneAddress& sender);
  void send_welcome(std::uint64_t path);
  void lose(const std::string& reason);

  const std::uint64_t id_;
  const Context& context_;
  CompletionList& completions_;
  const Limits limits_;
  std::unique_ptr<Worker> worker_;
  ucp_ep_h watch_ = nullptr;
  // Packed addresses: of the sender that is expected, of the one that came and of its worker.
  std::string expected_;
  std::string came_;
  std::string came_worker_;
  std::uint64_t deadline_ns_ = 0;
  std::deque<std::string> hellos_;
  // Kept until UCX has sent it.
  std::string welcome_;
  bool welcoming_ = false;
  std::string lost_;
};

}  // namespace pdx::ucx
