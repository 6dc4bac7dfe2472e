#include "pdx/ucx/receive_worker.h"

#include "pdx/ucx/context.h"
#include "pdx/ucx/endpoint.h"
#include "pdx/ucx/status.h"

namespace pdx::ucx {
namespace {

// A forced close ends within a few turns; the worker is destroyed with its endpoints anyway.
constexpr int kCloseTurns = 10'000;

}  // namespace

ReceiveWorker::ReceiveWorker(std::uint64_t id, const Context& context, CompletionList& completions,
                             Limits limits)
    : id_(id), context_(context), completions_(completions), limits_(limits), worker_(context) {
  ucp_am_handler_param_t param{};
  param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                     UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = kCommitMessage;
  param.flags = UCP_AM_FLAG_WHOLE_MSG;
  param.cb = &ReceiveWorker::on_commit;
  param.arg = this;
  check(ucp_worker_set_am_recv_handler(worker_.handle(), &param), "listening for commits");
}

ReceiveWorker::~ReceiveWorker() { close_watch(); }

void ReceiveWorker::watch(const LaneAddress& sender, std::uint64_t deadline_ns) {
  const Runtime& ours = context_.runtime();
  const std::string problem = sender.version_problem(ours.major, ours.minor);
  if (!problem.empty()) {
    lose(problem);
    return;
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(sender.worker.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &ReceiveWorker::on_error;
  params.err_handler.arg = this;
  const ucs_status_t status = ucp_ep_create(worker_.handle(), &params, &watch_);
  if (status != UCS_OK) {
    watch_ = nullptr;
    lose("connecting back to the sender: " + status_text(status));
    return;
  }
  ucp_request_param_t flush{};
  flush.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  flush.cb.send = &ReceiveWorker::on_watch;
  flush.user_data = this;
  const ucs_status_ptr_t request = ucp_ep_flush_nbx(watch_, &flush);
  watch_pending_ = UCS_PTR_IS_PTR(request);
  watch_deadline_ns_ = deadline_ns;
  if (UCS_PTR_IS_ERR(request)) {
    lose("connecting back to the sender: " + status_text(UCS_PTR_STATUS(request)));
  }
}

void ReceiveWorker::housekeep(std::uint64_t now_ns) {
  if (watch_pending_ && now_ns > watch_deadline_ns_) {
    lose(status_text(UCS_ERR_TIMED_OUT) + ": the sender did not answer in time");
  }
}

void ReceiveWorker::lose(const std::string& reason) {
  if (lost_.empty()) {
    lost_ = reason;
  }
}

void ReceiveWorker::on_watch(void* request, ucs_status_t status, void* receiver) {
  ucp_request_free(request);
  auto& self = *static_cast<ReceiveWorker*>(receiver);
  self.watch_pending_ = false;
  if (status != UCS_OK) {
    self.lose("connecting back to the sender: " + status_text(status));
  }
}

void ReceiveWorker::on_error(void* receiver, ucp_ep_h /*handle*/, ucs_status_t status) {
  static_cast<ReceiveWorker*>(receiver)->lose("the connection to the sender ended: " +
                                              status_text(status));
}

ucs_status_t ReceiveWorker::on_commit(void* receiver, const void* /*header*/,
                                      std::size_t header_length, void* data, std::size_t length,
                                      const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<ReceiveWorker*>(receiver);
  const bool whole = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
  if (!whole || header_length != 0 || length > self.limits_.commit_bytes_max) {
    self.lose("the sender sent a commit of " + std::to_string(length) + " bytes; the limit is " +
              std::to_string(self.limits_.commit_bytes_max) + ", without header or rendezvous");
    return UCS_OK;
  }
  self.completions_.push({.event = Event::CommitArrived,
                          .id = self.id_,
                          .data = std::string(static_cast<const char*>(data), length),
                          .error = {}});
  return UCS_OK;
}

void ReceiveWorker::close_watch() {
  if (watch_ == nullptr) {
    return;
  }
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = ucp_ep_close_nbx(watch_, &param);
  watch_ = nullptr;
  if (!UCS_PTR_IS_PTR(request)) {
    return;
  }
  for (int i = 0; i < kCloseTurns && ucp_request_check_status(request) == UCS_INPROGRESS; ++i) {
    worker_.progress();
  }
  ucp_request_free(request);
}

}  // namespace pdx::ucx
