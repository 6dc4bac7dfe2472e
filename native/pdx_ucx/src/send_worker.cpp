#include "pdx/ucx/send_worker.h"

#include <algorithm>
#include <utility>

#include "pdx/ucx/context.h"

namespace pdx::ucx {

SendWorker::SendWorker(const Context& context, CommandQueue& commands, CompletionList& completions,
                       const Window& window, std::string rkey)
    : context_(context),
      commands_(commands),
      completions_(completions),
      window_(window),
      probe_bytes_("pdxprobe"),
      rkey_(std::move(rkey)),
      worker_(context) {
  LaneAddress address;
  address.ucx_major = context_.runtime().major;
  address.ucx_minor = context_.runtime().minor;
  address.worker = worker_.address();
  address_ = address.pack();
  worker_.on_message(kWelcomeMessage, &SendWorker::on_welcome, this);
}

ucs_status_t SendWorker::on_welcome(void* sender, const void* /*header*/,
                                    std::size_t /*header_length*/, void* data, std::size_t length,
                                    const ucp_am_recv_param_t* param) {
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 || length != sizeof(std::uint64_t)) {
    return UCS_OK;  // no welcome of ours: the path that waits for one ends at its deadline
  }
  const auto hello = unpack_hello(std::string(static_cast<const char*>(data), length));
  if (SendEndpoint* path = static_cast<SendWorker*>(sender)->find(hello.path)) {
    path->welcome();
  }
  return UCS_OK;
}

void SendWorker::connect(std::uint64_t path, const LaneAddress& address,
                         std::uint64_t deadline_ns) {
  auto endpoint = std::make_unique<SendEndpoint>(
      path, SendEndpoint::Parts{context_, worker_, commands_, completions_, window_, probe_bytes_,
                                address_, rkey_});
  endpoint->open(address, deadline_ns);
  endpoints_.emplace(path, std::move(endpoint));
}

SendEndpoint* SendWorker::find(std::uint64_t path) {
  const auto at = endpoints_.find(path);
  return at == endpoints_.end() ? nullptr : at->second.get();
}

bool SendWorker::pump() {
  bool posted = false;
  for (const auto& [path, endpoint] : endpoints_) {
    posted = endpoint->pump() || posted;
  }
  return posted;
}

void SendWorker::housekeep(std::uint64_t now_ns, std::uint64_t turn) {
  for (const auto& [path, endpoint] : endpoints_) {
    endpoint->housekeep(now_ns, turn);
  }
  std::erase_if(endpoints_, [](const auto& entry) { return entry.second->gone(); });
}

void SendWorker::drop_all(const std::string& reason) {
  for (const auto& [path, endpoint] : endpoints_) {
    endpoint->drop_all(reason);
  }
}

bool SendWorker::busy() const {
  return std::any_of(endpoints_.begin(), endpoints_.end(),
                     [](const auto& entry) { return entry.second->busy(); });
}

bool SendWorker::settling() const {
  return std::any_of(endpoints_.begin(), endpoints_.end(),
                     [](const auto& entry) { return entry.second->closing(); });
}

void SendWorker::close_all(const std::string& reason) {
  for (const auto& [path, endpoint] : endpoints_) {
    endpoint->close(reason);
  }
}

}  // namespace pdx::ucx
