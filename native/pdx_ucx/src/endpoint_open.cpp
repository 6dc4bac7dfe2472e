// How a path opens; how it ends is in endpoint_end.cpp.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "pdx/ucx/context.h"
#include "pdx/ucx/endpoint.h"
#include "pdx/ucx/status.h"
#include "pdx/ucx/worker.h"

namespace pdx::ucx {

void SendEndpoint::open(const LaneAddress& address, std::uint64_t deadline_ns) {
  open_deadline_ns_ = deadline_ns;
  const Runtime& ours = context_.runtime();
  open_error_ = address.version_problem(ours.major, ours.minor);
  if (open_error_.empty() && address.probe.rkey.empty()) {
    open_error_ = "the address is not that of a receiver";
  }
  if (open_error_.empty()) {
    open_error_ = rkey_problem(rkey_, address.probe.rkey);
  }
  if (!open_error_.empty()) {
    return;
  }
  try {
    worker_ = std::make_unique<Worker>(context_, workers_);
    worker_->on_message(kWelcomeMessage, &SendEndpoint::on_welcome, this);
    create_handle(address);
    probe_ = address.probe;
    connect();
  } catch (const ResourceError& error) {
    open_error_ = error.what();
  }
}

void SendEndpoint::create_handle(const LaneAddress& address) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &SendEndpoint::on_error;
  params.err_handler.arg = this;
  std::string problem;
  handle_ = worker_->connect(address.worker, params, problem);
  if (handle_ == nullptr) {
    throw ResourceError("connecting to the receiver: " + problem);
  }
}

void SendEndpoint::open_further() {
  if (opening_in_flight_ + puts_in_flight_ > 0 || (step_ == Step::Hello && !welcomed_)) {
    return;
  }
  try {
    if (step_ == Step::Connect) {
      step_ = Step::Probe;
      write_probe();
    } else if (step_ == Step::Probe) {
      step_ = Step::Hello;
      say_hello();
    } else {
      opened();
    }
  } catch (const ResourceError& error) {
    open_error_ = error.what();
  }
  wake();
}

// No write is posted before: one that waits for its connection could not be told from one that is
// being made, when the path ends.
void SendEndpoint::connect() {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &SendEndpoint::on_open;
  param.user_data = this;
  open_step(ucp_ep_flush_nbx(handle_, &param));
  wake();
}

void SendEndpoint::write_probe() {
  const auto key = std::make_shared<RemoteKey>(handle_, probe_.rkey);
  keys_[probe_.rkey] = key;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.user_data = this;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  param.cb.send = &SendEndpoint::on_probe;
  const std::uint64_t length =
      std::min<std::uint64_t>(probe_bytes_.size(), probe_.range.length_bytes);
  ++puts_in_flight_;
  const ucs_status_ptr_t request = ucp_put_nbx(handle_, probe_bytes_.data(), length,
                                               probe_.range.address, key->handle(), &param);
  if (!UCS_PTR_IS_PTR(request)) {
    --puts_in_flight_;
    end_of_step(UCS_PTR_STATUS(request));
  }
  param.cb.send = &SendEndpoint::on_open;
  open_step(ucp_ep_flush_nbx(handle_, &param));
}

void SendEndpoint::say_hello() {
  LaneAddress own;
  own.ucx_major = context_.runtime().major;
  own.ucx_minor = context_.runtime().minor;
  own.worker = worker_->address();
  hello_ = Hello{id_, send_address_, own.pack()}.pack();
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = &SendEndpoint::on_open;
  param.user_data = this;
  open_step(
      ucp_am_send_nbx(handle_, kHelloMessage, nullptr, 0, hello_.data(), hello_.size(), &param));
}

ucs_status_t SendEndpoint::on_welcome(void* endpoint, const void* /*header*/,
                                      std::size_t /*header_length*/, void* data, std::size_t length,
                                      const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<SendEndpoint*>(endpoint);
  const bool whole = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
  // What is no welcome of this path is not heard: then the path ends at its deadline.
  self.welcomed_ = self.welcomed_ || (whole && std::string(static_cast<const char*>(data),
                                                           length) == pack_welcome(self.id_));
  return UCS_OK;
}

void SendEndpoint::open_step(ucs_status_ptr_t request) {
  if (UCS_PTR_IS_PTR(request)) {
    ++opening_in_flight_;
  } else {
    end_of_step(UCS_PTR_STATUS(request));
  }
}

void SendEndpoint::end_of_step(ucs_status_t status) {
  if (status != UCS_OK && open_error_.empty()) {
    open_error_ = "first write to the receiver: " + status_text(status);
  }
}

void SendEndpoint::on_open(void* request, ucs_status_t status, void* endpoint) {
  ucp_request_free(request);
  auto& self = *static_cast<SendEndpoint*>(endpoint);
  --self.opening_in_flight_;
  self.end_of_step(status);
}

void SendEndpoint::on_probe(void* request, ucs_status_t status, void* endpoint) {
  ucp_request_free(request);
  auto& self = *static_cast<SendEndpoint*>(endpoint);
  --self.puts_in_flight_;
  self.end_of_step(status);
}

void SendEndpoint::on_error(void* endpoint, ucp_ep_h /*handle*/, ucs_status_t status) {
  auto& self = *static_cast<SendEndpoint*>(endpoint);
  if (self.end_reason_.empty()) {
    self.end_reason_ = "the connection to the receiver ended: " + status_text(status);
  }
}

std::string SendEndpoint::transports() const {
  // Older runtimes answer success and fill nothing.
  if (!context_.runtime().at_least(1, 15)) {
    return context_.lane() == "tcp" ? "tcp" : "";
  }
  std::array<ucp_transport_entry_t, 32> entries{};
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports.entries = entries.data();
  attributes.transports.num_entries = static_cast<unsigned>(entries.size());
  attributes.transports.entry_size = sizeof(ucp_transport_entry_t);
  if (ucp_ep_query(handle_, &attributes) != UCS_OK) {
    return "";
  }
  std::string text;
  for (unsigned i = 0; i < attributes.transports.num_entries; ++i) {
    const std::string name = std::string(entries[i].transport_name) + "/" + entries[i].device_name;
    if ((" " + text + " ").find(" " + name + " ") == std::string::npos) {
      text += (text.empty() ? "" : " ") + name;
    }
  }
  return text;
}

void SendEndpoint::opened() {
  const std::string used = transports();
  open_error_ = transports_problem(context_.lane(), used);
  if (!open_error_.empty()) {
    return;
  }
  state_ = State::Open;
  open_reported_ = true;
  completions_.push({.event = Event::PathOpened, .id = id_, .data = used, .error = {}});
  for (const auto& [number, transfer] : generations_) {
    settle(*transfer);
  }
}

}  // namespace pdx::ucx
