// A path: one worker and its endpoint to one receiver, with its window and its transfers.
#pragma once
#include <ucp/api/ucp.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "pdx/ucx/completion_list.h"
#include "pdx/ucx/generation.h"
#include "pdx/ucx/lane_address.h"
#include "pdx/ucx/region.h"

namespace pdx::ucx {

class CommandQueue;
class Context;
class Worker;
class WorkerSet;

// How much of an endpoint is in flight at once. More is posted while `bytes` are not reached; small
// puts go on until `descriptors_min`, as long as four times `bytes` are not reached either.
struct Window {
  std::uint64_t bytes = std::uint64_t{16} << 20;
  std::uint64_t descriptors_min = 256;
};

// Active messages. A sender's first one is its hello; see SendEndpoint.
inline constexpr unsigned kCommitMessage = 1;
inline constexpr unsigned kHelloMessage = 2;
inline constexpr unsigned kWelcomeMessage = 3;

// Opening: a flush makes the connection; a first write to the receiver's probe and its flush show
// that writes work; then the hello, which carries this path's number, the sender's address and that
// of this path's worker. The receiver opens its own endpoint to that worker and answers with the
// welcome; only then is the path open. The order matters: UCX 1.22 crashes at the receiver when an
// endpoint is made to a tcp peer whose write is just coming in, so none may be under way until the
// receiver has its endpoint.
//
// Opening > Open > Leaving > Closing > Gone, or from any of the first three to Closing. Leaving:
// our side ends the path; nothing new is written, and what is in flight may land for a short while.
// Closing: the worker is destroyed, on tcp with whatever is in flight. A worker serves one path
// only because nothing less than its end stops writes of a hung peer's path without harm.
// Reports PathOpened once, one Posted per batch, one CommitSent per commit, and PathClosed once at
// its end, also when it never opened.
//
// Threads: the progress thread only. UCX callbacks run inside `Worker::progress` and the end of the
// worker, and never close or free anything; `housekeep` does.
class SendEndpoint {
 public:
  struct Parts {
    const Context& context;
    WorkerSet& workers;
    CommandQueue& commands;
    CompletionList& completions;
    const Window& window;
    const std::string& probe_bytes;
    // What this sender calls itself.
    const std::string& send_address;
    // One of our remote keys.
    const std::string& rkey;
  };

  SendEndpoint(std::uint64_t id, const Parts& parts);
  // Only when gone.
  ~SendEndpoint();
  SendEndpoint(const SendEndpoint&) = delete;
  SendEndpoint& operator=(const SendEndpoint&) = delete;

  void open(const LaneAddress& address, std::uint64_t deadline_ns);
  void post(std::uint64_t generation, std::vector<std::unique_ptr<Batch>> batches);
  void commit(std::uint64_t generation, std::unique_ptr<Commit> commit);
  // deadline_ns 0: none.
  void cancel(std::uint64_t generation, std::uint64_t deadline_ns);
  // Leaves, until `force_ns` at the latest. `reason` ends what is not posted.
  void close(const std::string& reason, std::uint64_t force_ns);
  // Ends the path at once. `reason` ends what is outstanding.
  void force(const std::string& reason);
  // Drops what is not posted; what is in flight goes on.
  void drop_all(const std::string& reason);
  // Posts some of the next transfer's runs; false when there was nothing to do or no room.
  bool pump();
  // Acts on errors and deadlines, closes, frees. `turn` counts turns of the loop.
  void housekeep(std::uint64_t now_ns, std::uint64_t turn);

  bool gone() const { return state_ == State::Gone; }
  bool busy() const;
  bool closing() const { return state_ == State::Closing; }
  std::uint64_t id() const { return id_; }

 private:
  enum class State { Opening, Open, Leaving, Closing, Gone };

  static void on_put(void* request, ucs_status_t status, void* piece);
  static void on_flush(void* request, ucs_status_t status, void* batch);
  static void on_commit(void* request, ucs_status_t status, void* commit);
  static void on_open(void* request, ucs_status_t status, void* endpoint);
  static void on_probe(void* request, ucs_status_t status, void* endpoint);
  static void on_error(void* endpoint, ucp_ep_h handle, ucs_status_t status);
  static ucs_status_t on_welcome(void* endpoint, const void* header, std::size_t header_length,
                                 void* data, std::size_t length, const ucp_am_recv_param_t* param);

  void create_handle(const LaneAddress& address);
  void open_further();
  void connect();
  void write_probe();
  void say_hello();
  void open_step(ucs_status_ptr_t request);
  void end_of_step(ucs_status_t status);
  void opened();
  std::string transports() const;

  Generation& generation(std::uint64_t id);
  bool window_open() const;
  void post_quantum(Generation& generation);
  void put(Piece& piece);
  RemoteKey* key_for(Batch& batch, std::uint32_t region);
  void put_done(Piece& piece, ucs_status_t status);
  void start_flush(Batch& batch);
  void flush_done(Batch& batch, ucs_status_t status);
  void fail(Batch& batch, const std::string& text);
  void drop_unposted(Generation& generation, const std::string& reason);
  void settle(Batch& batch);
  void settle(Generation& generation);
  void send_commit(Commit& commit);
  void commit_done(Commit& commit, const std::string& error);
  void report(const Batch& batch);

  // Why nothing new is written any more; empty while it is.
  const std::string& ending() const;
  bool in_flight() const;
  void wake();
  void check_deadlines(std::uint64_t now_ns);
  void begin_close();
  bool worker_may_end(std::uint64_t turn);
  void end_worker();
  void end_what_is_left();
  void finish_close(std::uint64_t turn);
  void sweep();

  const std::uint64_t id_;
  const Context& context_;
  WorkerSet& workers_;
  CommandQueue& commands_;
  CompletionList& completions_;
  const Window& window_;
  const std::string& probe_bytes_;
  const std::string& send_address_;
  const std::string& rkey_;

  State state_ = State::Opening;
  std::unique_ptr<Worker> worker_;
  ucp_ep_h handle_ = nullptr;
  // Turns in which it had no write in flight any more, and in which its worker was destroyed.
  std::uint64_t quiet_turn_ = 0;
  std::uint64_t end_turn_ = 0;
  std::uint64_t open_deadline_ns_ = 0;
  std::uint64_t force_ns_ = 0;
  std::string leave_reason_;
  // First reason why this path ends at once; empty while it does not.
  std::string end_reason_;
  std::string open_error_;
  enum class Step { Connect, Probe, Hello } step_ = Step::Connect;
  RemoteRange probe_{};
  // Kept until UCX has sent it.
  std::string hello_;
  bool welcomed_ = false;
  bool open_reported_ = false;
  // Writes that ended without proof that their bytes are at rest at the peer.
  bool undrained_ = false;
  bool dirty_ = false;

  std::uint64_t bytes_in_flight_ = 0;
  std::uint64_t puts_in_flight_ = 0;
  std::uint64_t flushes_in_flight_ = 0;
  std::uint64_t commits_in_flight_ = 0;
  unsigned opening_in_flight_ = 0;
  std::size_t cancelling_ = 0;

  std::unordered_map<std::uint64_t, std::unique_ptr<Generation>> generations_;
  // Those with something to post, next one first.
  std::deque<Generation*> ready_;
  Tombstones dead_;
  std::unordered_map<std::string, std::shared_ptr<RemoteKey>> keys_;
};

}  // namespace pdx::ucx
