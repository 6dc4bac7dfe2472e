// How a path ends, and what it looks after in every turn.
#include "pdx/ucx/clock.h"
#include "pdx/ucx/command_queue.h"
#include "pdx/ucx/context.h"
#include "pdx/ucx/endpoint.h"
#include "pdx/ucx/status.h"
#include "pdx/ucx/worker.h"

namespace pdx::ucx {
namespace {

// UCX takes one or two to empty the queue of an endpoint.
constexpr std::uint64_t kQuietTurns = 256;

}  // namespace

void SendEndpoint::close(const std::string& reason, std::uint64_t force_ns) {
  if (state_ == State::Opening) {
    force(reason);
  }
  if (state_ != State::Open || !end_reason_.empty()) {
    return;
  }
  state_ = State::Leaving;
  leave_reason_ = reason;
  force_ns_ = force_ns;
  commands_.close_gate(id_);
  drop_all(reason);
}

void SendEndpoint::force(const std::string& reason) {
  if (end_reason_.empty()) {
    end_reason_ = reason;
  }
}

const std::string& SendEndpoint::ending() const {
  return end_reason_.empty() ? leave_reason_ : end_reason_;
}

bool SendEndpoint::in_flight() const {
  return puts_in_flight_ + flushes_in_flight_ + commits_in_flight_ + opening_in_flight_ > 0;
}

void SendEndpoint::wake() {
  if (worker_ != nullptr) {
    worker_->wake(now_ns());
  }
}

void SendEndpoint::check_deadlines(std::uint64_t now_ns) {
  if (state_ == State::Opening && now_ns > open_deadline_ns_) {
    open_error_ = status_text(UCS_ERR_TIMED_OUT) + ": the receiver did not answer in time";
  }
  if (state_ == State::Leaving && (!in_flight() || now_ns > force_ns_)) {
    force(leave_reason_);
  }
  if (cancelling_ == 0 || state_ != State::Open) {
    return;
  }
  for (const auto& [number, transfer] : generations_) {
    if (transfer->cancelling && transfer->cancel_deadline_ns != 0 &&
        now_ns > transfer->cancel_deadline_ns) {
      force(status_text(UCS_ERR_TIMED_OUT) + ": generation " + std::to_string(number) +
            " was cancelled and did not drain in time");
      return;
    }
  }
}

void SendEndpoint::housekeep(std::uint64_t now_ns, std::uint64_t turn) {
  if (state_ == State::Opening || state_ == State::Leaving || cancelling_ > 0) {
    check_deadlines(now_ns);
  }
  if (state_ == State::Opening && open_error_.empty()) {
    open_further();
  }
  if (state_ == State::Opening && end_reason_.empty()) {
    end_reason_ = open_error_;
  }
  if (state_ != State::Closing && !end_reason_.empty()) {
    begin_close();
  }
  if (dirty_) {
    sweep();
  }
  if (state_ == State::Closing) {
    finish_close(turn);
  }
}

void SendEndpoint::begin_close() {
  commands_.close_gate(id_);
  undrained_ = undrained_ || puts_in_flight_ > 0 || flushes_in_flight_ > 0;
  state_ = State::Closing;
  if (!open_reported_) {
    open_reported_ = true;
    completions_.push({.event = Event::PathOpened, .id = id_, .data = {}, .error = end_reason_});
  }
  for (const auto& [number, transfer] : generations_) {
    drop_unposted(*transfer, end_reason_);
    settle(*transfer);
    transfer->cancelling = false;
  }
  cancelling_ = 0;
  dirty_ = true;
}

// On cma UCX 1.22 aborts the process when the worker of an endpoint ends while copies are queued on
// it, or flushes behind them. The copies are made by this thread whatever the peer does, so they
// end by themselves; then the queue empties within a few turns, and nothing is put there any more.
bool SendEndpoint::worker_may_end(std::uint64_t turn) {
  if (context_.lane() != "cma" || worker_ == nullptr) {
    return true;
  }
  if (puts_in_flight_ > 0) {
    return false;
  }
  quiet_turn_ = quiet_turn_ == 0 ? turn : quiet_turn_;
  return turn > quiet_turn_ + kQuietTurns;
}

void SendEndpoint::end_worker() {
  if (handle_ != nullptr) {
    close_with_worker(handle_);
    handle_ = nullptr;
  }
  // Keys are the worker's; after a forced close nothing uses them.
  for (const auto& [number, transfer] : generations_) {
    for (const auto& batch : transfer->batches) {
      batch->regions->keys.clear();
    }
  }
  keys_.clear();
  worker_.reset();
}

// Without the worker no callback comes any more.
void SendEndpoint::end_what_is_left() {
  puts_in_flight_ = flushes_in_flight_ = commits_in_flight_ = opening_in_flight_ = 0;
  for (const auto& [number, transfer] : generations_) {
    for (const auto& batch : transfer->batches) {
      if (!batch->finished) {
        batch->fail(end_reason_);
        batch->in_flight = 0;
        batch->flush_pending = false;
        settle(*batch);
      }
    }
    for (const auto& commit : transfer->commits) {
      if (!commit->finished) {
        commit_done(*commit, end_reason_);
      }
    }
  }
}

void SendEndpoint::finish_close(std::uint64_t turn) {
  if (end_turn_ == 0) {
    if (!worker_may_end(turn)) {
      wake();
      return;
    }
    end_worker();
    end_what_is_left();
    end_turn_ = turn;
  }
  // Commands taken before the gate closed run in the turn after; they still get their answers.
  if (turn < end_turn_ + 2) {
    return;
  }
  sweep();
  state_ = State::Gone;
  // cma writes are made by this very thread: none is under way once their requests have ended.
  // On a network, bytes already handed to it may still be written.
  const bool drained = !undrained_ || context_.lane() == "cma";
  completions_.push({.event = Event::PathClosed,
                     .id = id_,
                     .drained = drained,
                     .data = {},
                     .error = end_reason_});
}

}  // namespace pdx::ucx
