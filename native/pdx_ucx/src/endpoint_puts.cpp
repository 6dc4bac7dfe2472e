// The puts and flushes of a path, and how much of them is in flight at once.
#include <utility>

#include "pdx/ucx/context.h"
#include "pdx/ucx/endpoint.h"
#include "pdx/ucx/status.h"

namespace pdx::ucx {
namespace {

// What one turn posts for one transfer before the next one has its turn.
constexpr std::uint64_t kQuantumBytes = std::uint64_t{4} << 20;
constexpr std::uint64_t kQuantumDescriptors = 64;
// Above the byte window small puts go on up to the descriptor floor, but never further than this.
constexpr std::uint64_t kFloorWindows = 4;

}  // namespace

bool SendEndpoint::window_open() const {
  return bytes_in_flight_ < window_.bytes || (puts_in_flight_ < window_.descriptors_min &&
                                              bytes_in_flight_ < kFloorWindows * window_.bytes);
}

bool SendEndpoint::pump() {
  if (state_ != State::Open || !end_reason_.empty() || ready_.empty() || !window_open()) {
    return false;
  }
  Generation& transfer = *ready_.front();
  ready_.pop_front();
  post_quantum(transfer);
  if (transfer.next_unposted() != nullptr) {
    ready_.push_back(&transfer);
  } else {
    transfer.ready = false;
  }
  dirty_ = true;
  wake();
  return true;
}

void SendEndpoint::post_quantum(Generation& transfer) {
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
  while (Batch* batch = transfer.next_unposted()) {
    if (bytes >= kQuantumBytes || count >= kQuantumDescriptors || !window_open()) {
      return;
    }
    Piece& piece = batch->pieces[batch->cursor];
    bytes += piece.length_bytes;
    ++count;
    put(piece);
  }
}

void SendEndpoint::put(Piece& piece) {
  Batch& batch = *piece.batch;
  RemoteKey* key = key_for(batch, piece.destination_region);
  if (key == nullptr) {
    return;  // the batch has failed
  }
  ++batch.cursor;
  ++batch.in_flight;
  batch.posted_any = true;
  ++puts_in_flight_;
  bytes_in_flight_ += piece.length_bytes;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = &SendEndpoint::on_put;
  param.user_data = &piece;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  if (context_.runtime().at_least(1, 15)) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = batch.regions->source[piece.source_region]->handle();
  }
  const ucs_status_ptr_t request =
      ucp_put_nbx(handle_, reinterpret_cast<const void*>(piece.source), piece.length_bytes,
                  piece.destination, key->handle(), &param);
  if (!UCS_PTR_IS_PTR(request)) {
    put_done(piece, UCS_PTR_STATUS(request));
  } else if (!batch.unposted()) {
    settle(batch);
  }
}

RemoteKey* SendEndpoint::key_for(Batch& batch, std::uint32_t region) {
  auto& keys = batch.regions->keys;
  keys.resize(batch.regions->destination.size());
  if (keys[region] != nullptr) {
    return keys[region].get();
  }
  const std::string& packed = batch.regions->destination[region].rkey;
  auto& cached = keys_[packed];
  if (cached == nullptr) {
    try {
      cached = std::make_shared<RemoteKey>(handle_, packed);
    } catch (const ResourceError& error) {
      keys_.erase(packed);
      fail(batch, error.what());
      return nullptr;
    }
  }
  keys[region] = cached;
  return keys[region].get();
}

void SendEndpoint::put_done(Piece& piece, ucs_status_t status) {
  Batch& batch = *piece.batch;
  --batch.in_flight;
  --puts_in_flight_;
  bytes_in_flight_ -= piece.length_bytes;
  dirty_ = true;
  if (status == UCS_OK) {
    batch.bytes_done += piece.length_bytes;
    batch.runs_done += piece.ends_run;
  } else {
    undrained_ = true;
    fail(batch, "put: " + status_text(status));
  }
  settle(batch);
}

void SendEndpoint::on_put(void* request, ucs_status_t status, void* piece) {
  ucp_request_free(request);
  auto& done = *static_cast<Piece*>(piece);
  done.batch->generation->endpoint.put_done(done, status);
}

void SendEndpoint::start_flush(Batch& batch) {
  batch.flush_started = true;
  batch.flush_pending = true;
  ++flushes_in_flight_;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &SendEndpoint::on_flush;
  param.user_data = &batch;
  const ucs_status_ptr_t request = ucp_ep_flush_nbx(handle_, &param);
  if (!UCS_PTR_IS_PTR(request)) {
    flush_done(batch, UCS_PTR_STATUS(request));
  }
}

void SendEndpoint::flush_done(Batch& batch, ucs_status_t status) {
  batch.flush_pending = false;
  --flushes_in_flight_;
  dirty_ = true;
  if (status != UCS_OK) {
    // Without a flush nobody can say when the peer's memory is at rest: the path ends.
    undrained_ = true;
    const std::string text = "flush: " + status_text(status);
    end_reason_ = end_reason_.empty() ? text : end_reason_;
    fail(batch, text);
  }
  settle(batch);
}

void SendEndpoint::on_flush(void* request, ucs_status_t status, void* batch) {
  ucp_request_free(request);
  auto& done = *static_cast<Batch*>(batch);
  done.generation->endpoint.flush_done(done, status);
}

}  // namespace pdx::ucx
