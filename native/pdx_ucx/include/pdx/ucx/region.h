// A registered range of this process, and a peer's range as an endpoint may write it.
#pragma once
#include <ucp/api/ucp.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pdx/ucx/bounds.h"

namespace pdx::ucx {

class Context;

// Owns the registration, not the memory: the owner keeps the memory mapped until RegionReleased.
// Threads: made on the progress thread; its values may be read by any. It ends where it is let go
// last: on the progress thread, or, when the engine was closed meanwhile, on that of a `post`. So
// it keeps the context that it belongs to.
class Region {
 public:
  Region(std::shared_ptr<const Context> context, Range range);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const Range& range() const { return range_; }
  ucp_mem_h handle() const { return handle_; }
  // The remote key, as it is sent to peers.
  const std::string& rkey() const { return rkey_; }

 private:
  Range range_;
  std::shared_ptr<const Context> context_;
  ucp_mem_h handle_ = nullptr;
  std::string rkey_;
};

// A peer's range as it was told to us.
struct RemoteRange {
  Range range;
  std::string rkey;
};

// Empty, or why a peer's remote key cannot be one of this lane. `ours` is any remote key of ours:
// those of host memory all have one length here and begin alike. UCX itself takes no length with a
// key and reads as far as the first bytes tell it to.
std::string rkey_problem(const std::string& ours, const std::string& theirs);

// A remote key unpacked for one endpoint. Destroyed after every put that uses it has ended.
// Threads: the progress thread only.
class RemoteKey {
 public:
  // Raises: ResourceError with the UCX status.
  RemoteKey(ucp_ep_h endpoint, const std::string& packed);
  ~RemoteKey();
  RemoteKey(const RemoteKey&) = delete;
  RemoteKey& operator=(const RemoteKey&) = delete;

  ucp_rkey_h handle() const { return handle_; }

 private:
  ucp_rkey_h handle_ = nullptr;
};

// The regions of an engine by number. Threads: any; `take_unused` on the progress thread.
class RegionTable {
 public:
  std::uint64_t add(std::shared_ptr<Region> region);
  // Throws UsageError for a number that is not registered.
  std::shared_ptr<Region> find(std::uint64_t id) const;
  // No later `find` succeeds; the region stays until nothing uses it. False: not registered.
  bool retire(std::uint64_t id);
  // Unregisters those retired regions that no batch uses any more and returns their numbers.
  std::vector<std::uint64_t> release_unused();
  // Unregisters everything.
  void clear();

 private:
  mutable std::mutex mutex_;
  std::uint64_t next_ = 1;
  std::map<std::uint64_t, std::shared_ptr<Region>> live_;
  std::map<std::uint64_t, std::shared_ptr<Region>> retired_;
};

}  // namespace pdx::ucx
