#include "pdx/ucx/worker.h"

#include "pdx/ucx/context.h"
#include "pdx/ucx/status.h"

namespace pdx::ucx {

Worker::Worker(const Context& context) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(ucp_worker_create(context.handle(), &params, &handle_), "creating a UCX worker");
  ucp_address_t* raw = nullptr;
  std::size_t size = 0;
  ucs_status_t status = ucp_worker_get_efd(handle_, &fd_);
  if (status == UCS_OK) {
    status = ucp_worker_get_address(handle_, &raw, &size);
  }
  if (status != UCS_OK) {
    ucp_worker_destroy(handle_);
    check(status, "asking a UCX worker for its descriptor and address");
  }
  address_.assign(reinterpret_cast<const char*>(raw), size);
  ucp_worker_release_address(handle_, raw);
}

Worker::~Worker() { ucp_worker_destroy(handle_); }

void Worker::on_message(unsigned id, ucp_am_recv_callback_t handler, void* argument) {
  ucp_am_handler_param_t param{};
  param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                     UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = id;
  param.flags = UCP_AM_FLAG_WHOLE_MSG;
  param.cb = handler;
  param.arg = argument;
  check(ucp_worker_set_am_recv_handler(handle_, &param), "listening for messages");
}

bool Worker::progress() { return ucp_worker_progress(handle_) != 0; }

bool Worker::arm() {
  armed = ucp_worker_arm(handle_) == UCS_OK;
  return armed;
}

void Worker::wake(std::uint64_t now_ns) {
  armed = false;
  last_event_ns = now_ns;
}

}  // namespace pdx::ucx
