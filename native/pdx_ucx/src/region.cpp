#include "pdx/ucx/region.h"

#include <utility>

#include "pdx/ucx/context.h"
#include "pdx/ucx/status.h"

namespace pdx::ucx {
namespace {

// The map of memory domains, which says what follows, and the memory type.
constexpr std::size_t kRkeyHead = 9;

}  // namespace

Region::Region(std::shared_ptr<const Context> context, Range range)
    : range_(range), context_(std::move(context)) {
  const std::lock_guard lock(context_->memory_mutex());
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = reinterpret_cast<void*>(range.address);
  params.length = range.length_bytes;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  check(ucp_mem_map(context_->handle(), &params, &handle_), "registering memory");
  void* packed = nullptr;
  std::size_t size = 0;
  const ucs_status_t status = ucp_rkey_pack(context_->handle(), handle_, &packed, &size);
  if (status != UCS_OK) {
    ucp_mem_unmap(context_->handle(), handle_);
    check(status, "packing a remote key");
  }
  rkey_.assign(static_cast<const char*>(packed), size);
  ucp_rkey_buffer_release(packed);
}

Region::~Region() {
  const std::lock_guard lock(context_->memory_mutex());
  ucp_mem_unmap(context_->handle(), handle_);
}

std::string rkey_problem(const std::string& ours, const std::string& theirs) {
  if (theirs.size() == ours.size() && theirs.compare(0, kRkeyHead, ours, 0, kRkeyHead) == 0) {
    return {};
  }
  return "the remote key of " + std::to_string(theirs.size()) +
         " bytes is not one of host memory on this lane; ours have " + std::to_string(ours.size()) +
         " bytes, of which the first " + std::to_string(kRkeyHead) + " are the same in all";
}

RemoteKey::RemoteKey(ucp_ep_h endpoint, const std::string& packed) {
  check(ucp_ep_rkey_unpack(endpoint, packed.data(), &handle_), "unpacking a remote key");
}

RemoteKey::~RemoteKey() { ucp_rkey_destroy(handle_); }

std::uint64_t RegionTable::add(std::shared_ptr<Region> region) {
  const std::lock_guard lock(mutex_);
  live_.emplace(next_, std::move(region));
  return next_++;
}

std::shared_ptr<Region> RegionTable::find(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto at = live_.find(id);
  if (at == live_.end()) {
    throw UsageError("source region " + std::to_string(id) +
                     " is not registered with this engine; nothing of this post was sent");
  }
  return at->second;
}

bool RegionTable::retire(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  auto node = live_.extract(id);
  if (node.empty()) {
    return false;
  }
  retired_.insert(std::move(node));
  return true;
}

std::vector<std::uint64_t> RegionTable::release_unused() {
  std::vector<std::uint64_t> released;
  const std::lock_guard lock(mutex_);
  // `find` hands out no reference to a retired region, so a count of one can only stay so.
  std::erase_if(retired_, [&](const auto& entry) {
    if (entry.second.use_count() > 1) {
      return false;
    }
    released.push_back(entry.first);
    return true;
  });
  return released;
}

void RegionTable::clear() {
  const std::lock_guard lock(mutex_);
  live_.clear();
  retired_.clear();
}

}  // namespace pdx::ucx
