#include "pdx/ucx/worker.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <vector>

#include "pdx/ucx/context.h"
#include "pdx/ucx/status.h"
#include "pdx/ucx/worker_set.h"

namespace pdx::ucx {
namespace {

constexpr std::size_t kNumbersKeptMax = 512;
constexpr std::size_t kNumbersAtOnce = 128;

// When no descriptor is left for a connection that comes in, UCX 1.22 closes the listener for good
// and forgets to take back its handler: from then on a listener that gets the same descriptor is
// refused, and a worker whose event descriptor gets it may hang. So the lowest free numbers are
// kept from UCX until it makes a worker that works: many at once, since one less would only give
// the number to another descriptor of the next worker.
ucs_status_t create(ucp_context_h context, const ucp_worker_params_t& params,
                    ucp_worker_h* handle) {
  std::vector<int> kept;
  kept.reserve(kNumbersKeptMax);
  ucs_status_t status = ucp_worker_create(context, &params, handle);
  while (status == UCS_ERR_ALREADY_EXISTS && kept.size() < kNumbersKeptMax) {
    const std::size_t before = kept.size();
    while (kept.size() < before + kNumbersAtOnce) {
      const int number = eventfd(0, EFD_CLOEXEC);
      if (number < 0) {
        break;
      }
      kept.push_back(number);
    }
    if (kept.size() == before) {
      break;
    }
    status = ucp_worker_create(context, &params, handle);
  }
  for (const int number : kept) {
    close(number);
  }
  return status;
}

}  // namespace

Worker::Worker(const Context& context, WorkerSet& set) : set_(set) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(create(context.handle(), params, &handle_), "creating a UCX worker");
  try {
    learn_descriptor_and_address(context);
    set_.add(*this);
  } catch (...) {
    ucp_worker_destroy(handle_);
    throw;
  }
}

Worker::~Worker() {
  set_.remove(*this);
  ucp_worker_destroy(handle_);
}

void Worker::learn_descriptor_and_address(const Context& context) {
  const char* what = "asking a UCX worker for its descriptor and address";
  check(ucp_worker_get_efd(handle_, &fd_), what);
  ucp_address_t* raw = nullptr;
  std::size_t size = 0;
  check(ucp_worker_get_address(handle_, &raw, &size), what);
  address_.assign(reinterpret_cast<const char*>(raw), size);
  ucp_worker_release_address(handle_, raw);
  try {
    parsed_ = WorkerAddress::parse(address_);
  } catch (const UsageError& error) {
    throw ResourceError(std::string("the address that this UCX gives its own worker is not "
                                    "understood, so none of a peer can be checked: ") +
                        error.what());
  }
  const std::string& family = context.address_family();
  if (!family.empty() && parsed_.families() != family) {
    throw ResourceError("UCX listens on addresses of " + parsed_.families() + ", not of " + family +
                        " as the address that is bound: unset UCX_TCP_AF_PRIO and "
                        "UCX_NET_DEVICES, or use a newer UCX");
  }
}

ucp_ep_h Worker::connect(const std::string& address, ucp_ep_params_t params, std::string& problem) {
  problem = WorkerAddress::problem(address, parsed_);
  if (!problem.empty()) {
    return nullptr;
  }
  params.field_mask |= UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  ucp_ep_h endpoint = nullptr;
  const ucs_status_t status = ucp_ep_create(handle_, &params, &endpoint);
  if (status != UCS_OK) {
    problem = status_text(status);
    return nullptr;
  }
  return endpoint;
}

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

void close_with_worker(ucp_ep_h endpoint) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = ucp_ep_close_nbx(endpoint, &param);
  if (UCS_PTR_IS_PTR(request)) {
    ucp_request_free(request);
  }
}

}  // namespace pdx::ucx
