#include "pdx/ucx/receive_worker.h"

#include <utility>

#include "pdx/ucx/clock.h"
#include "pdx/ucx/context.h"
#include "pdx/ucx/endpoint.h"
#include "pdx/ucx/status.h"

namespace pdx::ucx {
namespace {

constexpr std::size_t kHelloBytesMax = 4096;
// A sender has one path at a time; some more may be on their way when it connects anew.
constexpr std::size_t kHellosMax = 16;

}  // namespace

ReceiveWorker::ReceiveWorker(std::uint64_t id, const Context& context, WorkerSet& workers,
                             CompletionList& completions, Limits limits)
    : id_(id),
      context_(context),
      completions_(completions),
      limits_(limits),
      worker_(std::make_unique<Worker>(context, workers)) {
  worker_->on_message(kCommitMessage, &ReceiveWorker::on_commit, this);
  worker_->on_message(kHelloMessage, &ReceiveWorker::on_hello, this);
}

ReceiveWorker::~ReceiveWorker() {
  if (watch_ != nullptr) {
    close_with_worker(watch_);
  }
  // Its last callbacks find everything else still there.
  worker_.reset();
}

void ReceiveWorker::expect(std::string sender_address, std::uint64_t deadline_ns) {
  expected_ = std::move(sender_address);
  deadline_ns_ = deadline_ns;
  if (!came_.empty() && came_ != expected_) {
    lose("another sender than the expected one has connected");
  }
}

void ReceiveWorker::greet(const std::string& hello) {
  try {
    const Hello said = Hello::unpack(hello);
    const LaneAddress worker = LaneAddress::unpack(said.worker);
    const Runtime& ours = context_.runtime();
    const std::string problem = worker.version_problem(ours.major, ours.minor);
    if (!problem.empty()) {
      lose(problem);
    } else if ((!came_.empty() && came_ != said.sender) ||
               (!expected_.empty() && expected_ != said.sender)) {
      lose("another sender than the expected one has connected");
    } else if (watch_ != nullptr && came_worker_ != said.worker) {
      lose("the sender has opened another path; that needs a receiver of its own");
    } else {
      came_ = said.sender;
      came_worker_ = said.worker;
      welcome(said.path, worker);
    }
  } catch (const UsageError& error) {
    lose(std::string("the sender's hello: ") + error.what());
  }
}

void ReceiveWorker::welcome(std::uint64_t path, const LaneAddress& worker) {
  if (watch_ == nullptr) {
    watch(worker);
  }
  if (watch_ != nullptr) {
    send_welcome(path);
  }
}

void ReceiveWorker::watch(const LaneAddress& sender) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &ReceiveWorker::on_error;
  params.err_handler.arg = this;
  std::string problem;
  watch_ = worker_->connect(sender.worker, params, problem);
  if (watch_ == nullptr) {
    lose("connecting back to the sender: " + problem);
  }
}

void ReceiveWorker::send_welcome(std::uint64_t path) {
  welcome_ = pack_welcome(path);
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = &ReceiveWorker::on_welcomed;
  param.user_data = this;
  const ucs_status_ptr_t request = ucp_am_send_nbx(watch_, kWelcomeMessage, nullptr, 0,
                                                   welcome_.data(), welcome_.size(), &param);
  welcoming_ = UCS_PTR_IS_PTR(request);
  worker_->wake(now_ns());
  if (UCS_PTR_IS_ERR(request)) {
    lose("answering the sender: " + status_text(UCS_PTR_STATUS(request)));
  }
}

void ReceiveWorker::housekeep(std::uint64_t now_ns) {
  if (!hellos_.empty() && !welcoming_ && lost_.empty()) {
    const std::string hello = std::move(hellos_.front());
    hellos_.pop_front();
    greet(hello);
  }
  if (came_.empty() && deadline_ns_ != 0 && now_ns > deadline_ns_) {
    lose(status_text(UCS_ERR_TIMED_OUT) + ": the sender did not connect in time");
  }
}

void ReceiveWorker::lose(const std::string& reason) {
  if (lost_.empty()) {
    lost_ = reason;
  }
}

void ReceiveWorker::on_welcomed(void* request, ucs_status_t status, void* receiver) {
  ucp_request_free(request);
  auto& self = *static_cast<ReceiveWorker*>(receiver);
  self.welcoming_ = false;
  if (status != UCS_OK) {
    self.lose("answering the sender: " + status_text(status));
  }
}

ucs_status_t ReceiveWorker::on_hello(void* receiver, const void* /*header*/,
                                     std::size_t /*header_length*/, void* data, std::size_t length,
                                     const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<ReceiveWorker*>(receiver);
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 || length > kHelloBytesMax ||
      self.hellos_.size() >= kHellosMax) {
    self.lose("the sender says hello in a way that is not allowed");
    return UCS_OK;
  }
  // No endpoint is made inside a callback: `housekeep` does.
  self.hellos_.emplace_back(static_cast<const char*>(data), length);
  return UCS_OK;
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

}  // namespace pdx::ucx
