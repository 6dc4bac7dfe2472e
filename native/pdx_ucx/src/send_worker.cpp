#include "pdx/ucx/send_worker.h"

#include <algorithm>

#include "pdx/ucx/context.h"

namespace pdx::ucx {

SendWorker::SendWorker(const Context& context, CommandQueue& commands, CompletionList& completions,
                       const Window& window)
    : context_(context),
      commands_(commands),
      completions_(completions),
      window_(window),
      probe_bytes_("pdxprobe"),
      worker_(context) {}

std::string SendWorker::address() const {
  LaneAddress address;
  address.ucx_major = context_.runtime().major;
  address.ucx_minor = context_.runtime().minor;
  address.worker = worker_.address();
  return address.pack();
}

void SendWorker::connect(std::uint64_t path, const LaneAddress& address,
                         std::uint64_t deadline_ns) {
  auto endpoint = std::make_unique<SendEndpoint>(
      path, SendEndpoint::Parts{context_, worker_, commands_, completions_, window_, probe_bytes_});
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
