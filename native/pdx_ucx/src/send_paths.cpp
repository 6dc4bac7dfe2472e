#include "pdx/ucx/send_paths.h"

#include <algorithm>
#include <random>
#include <utility>

#include "pdx/ucx/context.h"

namespace pdx::ucx {
namespace {

constexpr std::size_t kNameBytes = 16;

std::string make_address(const Runtime& runtime) {
  std::random_device random;
  LaneAddress address;
  address.ucx_major = runtime.major;
  address.ucx_minor = runtime.minor;
  for (std::size_t i = 0; i < kNameBytes; ++i) {
    address.worker.push_back(static_cast<char>(random() & 0xff));
  }
  return address.pack();
}

}  // namespace

SendPaths::SendPaths(const Context& context, WorkerSet& workers, CommandQueue& commands,
                     CompletionList& completions, const Window& window, std::string rkey)
    : context_(context),
      workers_(workers),
      commands_(commands),
      completions_(completions),
      window_(window),
      probe_bytes_("pdxprobe"),
      rkey_(std::move(rkey)),
      address_(make_address(context.runtime())) {}

void SendPaths::connect(std::uint64_t path, const LaneAddress& address, std::uint64_t deadline_ns) {
  auto endpoint = std::make_unique<SendEndpoint>(
      path, SendEndpoint::Parts{context_, workers_, commands_, completions_, window_, probe_bytes_,
                                address_, rkey_});
  endpoint->open(address, deadline_ns);
  endpoints_.emplace(path, std::move(endpoint));
}

SendEndpoint* SendPaths::find(std::uint64_t path) {
  const auto at = endpoints_.find(path);
  return at == endpoints_.end() ? nullptr : at->second.get();
}

bool SendPaths::pump() {
  bool posted = false;
  for (const auto& [path, endpoint] : endpoints_) {
    posted = endpoint->pump() || posted;
  }
  return posted;
}

void SendPaths::housekeep(std::uint64_t now_ns, std::uint64_t turn) {
  for (const auto& [path, endpoint] : endpoints_) {
    endpoint->housekeep(now_ns, turn);
  }
  std::erase_if(endpoints_, [](const auto& entry) { return entry.second->gone(); });
}

void SendPaths::drop_all(const std::string& reason) {
  for (const auto& [path, endpoint] : endpoints_) {
    endpoint->drop_all(reason);
  }
}

bool SendPaths::busy() const {
  return std::any_of(endpoints_.begin(), endpoints_.end(),
                     [](const auto& entry) { return entry.second->busy(); });
}

bool SendPaths::settling() const {
  return std::any_of(endpoints_.begin(), endpoints_.end(),
                     [](const auto& entry) { return entry.second->closing(); });
}

void SendPaths::close_all(const std::string& reason) {
  for (const auto& [path, endpoint] : endpoints_) {
    endpoint->force(reason);
  }
}

}  // namespace pdx::ucx
