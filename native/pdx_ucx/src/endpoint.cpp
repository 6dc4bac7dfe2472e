#include "pdx/ucx/endpoint.h"

#include <algorithm>
#include <utility>

#include "pdx/ucx/command_queue.h"
#include "pdx/ucx/context.h"
#include "pdx/ucx/status.h"
#include "pdx/ucx/worker.h"

namespace pdx::ucx {
namespace {

constexpr std::size_t kTombstonesMax = 65'536;
constexpr std::size_t kRemoteKeysMax = 16'384;

}  // namespace

SendEndpoint::SendEndpoint(std::uint64_t id, const Parts& parts)
    : id_(id),
      context_(parts.context),
      workers_(parts.workers),
      commands_(parts.commands),
      completions_(parts.completions),
      window_(parts.window),
      probe_bytes_(parts.probe_bytes),
      send_address_(parts.send_address),
      rkey_(parts.rkey),
      dead_(kTombstonesMax) {}

SendEndpoint::~SendEndpoint() = default;

void SendEndpoint::post(std::uint64_t number, std::vector<std::unique_ptr<Batch>> batches) {
  Generation& transfer = generation(number);
  if (const std::string* error = dead_.find(number); error != nullptr && transfer.error.empty()) {
    transfer.error = *error;
  }
  for (auto& batch : batches) {
    batch->generation = &transfer;
    ++transfer.outstanding;
    transfer.batches.push_back(std::move(batch));
  }
  if (!ending().empty()) {
    drop_unposted(transfer, ending());
  } else if (!transfer.error.empty()) {
    drop_unposted(transfer, transfer.error);
  }
  for (const auto& batch : transfer.batches) {
    if (batch->pieces.empty() && !transfer.error.empty()) {
      batch->fail(transfer.error);
    }
    settle(*batch);
  }
  if (transfer.next_unposted() != nullptr && !transfer.ready) {
    transfer.ready = true;
    ready_.push_back(&transfer);
  }
  dirty_ = true;
  wake();
}

void SendEndpoint::commit(std::uint64_t number, std::unique_ptr<Commit> commit) {
  Generation& transfer = generation(number);
  if (const std::string* error = dead_.find(number); error != nullptr && transfer.error.empty()) {
    transfer.error = *error;
  }
  commit->generation = &transfer;
  transfer.commits.push_back(std::move(commit));
  settle(transfer);
  dirty_ = true;
  wake();
}

void SendEndpoint::cancel(std::uint64_t number, std::uint64_t deadline_ns) {
  if (!end_reason_.empty()) {
    return;  // PathClosed will answer
  }
  Generation& transfer = generation(number);
  if (transfer.error.empty()) {
    transfer.error = "cancelled by the sender";
  }
  if (!transfer.cancelling) {
    transfer.cancelling = true;
    ++cancelling_;
  }
  transfer.cancel_deadline_ns = deadline_ns;
  drop_unposted(transfer, transfer.error);
  settle(transfer);
  dirty_ = true;
  wake();
}

void SendEndpoint::drop_all(const std::string& reason) {
  for (const auto& [number, transfer] : generations_) {
    if (transfer->next_unposted() != nullptr) {
      transfer->error = transfer->error.empty() ? reason : transfer->error;
      drop_unposted(*transfer, reason);
    }
  }
  wake();
}

bool SendEndpoint::busy() const {
  return std::any_of(generations_.begin(), generations_.end(),
                     [](const auto& entry) { return !entry.second->idle(); });
}

Generation& SendEndpoint::generation(std::uint64_t id) {
  auto& slot = generations_[id];
  if (slot == nullptr) {
    slot = std::make_unique<Generation>(id, *this);
  }
  return *slot;
}

void SendEndpoint::fail(Batch& batch, const std::string& text) {
  batch.fail(text);
  Generation& transfer = *batch.generation;
  if (transfer.error.empty()) {
    transfer.error = text;
  }
  drop_unposted(transfer, transfer.error);
}

void SendEndpoint::drop_unposted(Generation& transfer, const std::string& reason) {
  for (const auto& batch : transfer.batches) {
    if (batch->unposted()) {
      batch->fail(reason);
      batch->cursor = batch->pieces.size();
      settle(*batch);
    }
  }
}

void SendEndpoint::settle(Batch& batch) {
  if (batch.finished || batch.unposted()) {
    return;
  }
  const bool usable = (state_ == State::Open || state_ == State::Leaving) && end_reason_.empty();
  if (batch.posted_any && !batch.flush_started && usable) {
    start_flush(batch);
    return;  // flush_done settles again
  }
  if (batch.in_flight > 0 || batch.flush_pending) {
    return;
  }
  if (batch.posted_any && !batch.flush_started) {
    batch.fail(end_reason_);
    undrained_ = true;  // what was written has no flush to show that it is at rest
  }
  batch.finished = true;
  Generation& transfer = *batch.generation;
  if (!batch.error.empty() && transfer.error.empty()) {
    transfer.error = batch.error;
  }
  report(batch);
  --transfer.outstanding;
  settle(transfer);
}

void SendEndpoint::report(const Batch& batch) {
  completions_.push({.event = Event::Posted,
                     .id = id_,
                     .generation = batch.generation->id,
                     .ticket = batch.ticket,
                     .length_bytes = batch.bytes_done,
                     .runs = batch.runs_done,
                     .data = {},
                     .error = batch.error});
}

void SendEndpoint::settle(Generation& transfer) {
  if (transfer.outstanding > 0) {
    return;
  }
  const std::string& error = transfer.error.empty() ? ending() : transfer.error;
  for (const auto& commit : transfer.commits) {
    if (commit->sent || commit->finished) {
      continue;
    }
    if (!error.empty()) {
      commit_done(*commit, error);
    } else if (state_ == State::Open) {
      send_commit(*commit);
    }
  }
  if (transfer.cancelling && transfer.commits_finished() && end_reason_.empty()) {
    transfer.cancelling = false;
    --cancelling_;
    completions_.push(
        {.event = Event::Cancelled, .id = id_, .generation = transfer.id, .data = {}, .error = {}});
  }
}

void SendEndpoint::send_commit(Commit& commit) {
  commit.sent = true;
  ++commits_in_flight_;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = &SendEndpoint::on_commit;
  param.user_data = &commit;
  const ucs_status_ptr_t request = ucp_am_send_nbx(
      handle_, kCommitMessage, nullptr, 0, commit.payload.data(), commit.payload.size(), &param);
  if (!UCS_PTR_IS_PTR(request)) {
    --commits_in_flight_;
    const ucs_status_t status = UCS_PTR_STATUS(request);
    commit_done(commit, status == UCS_OK ? std::string() : "commit: " + status_text(status));
  }
}

void SendEndpoint::on_commit(void* request, ucs_status_t status, void* commit) {
  ucp_request_free(request);
  auto& done = *static_cast<Commit*>(commit);
  SendEndpoint& endpoint = done.generation->endpoint;
  --endpoint.commits_in_flight_;
  endpoint.commit_done(done, status == UCS_OK ? std::string() : "commit: " + status_text(status));
  endpoint.settle(*done.generation);
}

void SendEndpoint::commit_done(Commit& commit, const std::string& error) {
  commit.finished = true;
  dirty_ = true;
  completions_.push({.event = Event::CommitSent,
                     .id = id_,
                     .generation = commit.generation->id,
                     .ticket = commit.ticket,
                     .data = {},
                     .error = error});
}

void SendEndpoint::sweep() {
  dirty_ = false;
  std::erase_if(generations_, [this](const auto& entry) {
    Generation& transfer = *entry.second;
    transfer.sweep();
    if (!transfer.idle()) {
      return false;
    }
    if (!transfer.error.empty()) {
      dead_.add(transfer.id, transfer.error);
    }
    if (transfer.ready) {
      std::erase(ready_, &transfer);
    }
    return true;
  });
  if (keys_.size() > kRemoteKeysMax) {
    std::erase_if(keys_, [](const auto& entry) { return entry.second.use_count() == 1; });
  }
}

}  // namespace pdx::ucx
