// One UCX context: the settings of one lane, and what every worker and region belongs to.
#pragma once
#include <ucp/api/ucp.h>

#include <mutex>
#include <string>

#include "pdx/ucx/settings.h"

namespace pdx::ucx {

// The UCX that is really loaded, not the one whose headers were used.
struct Runtime {
  unsigned major;
  unsigned minor;
  unsigned release;
  // File that ucp_get_version came from.
  std::string path;

  std::string version() const;
  bool at_least(unsigned want_major, unsigned want_minor) const;
};

// Cost: one dladdr. Threads: any.
Runtime runtime();

// Threads: the progress thread; only its end, and memory under `memory_mutex`, may be on another
// one. Workers must be gone before it is destroyed; regions keep it.
class Context {
 public:
  // Raises: SettingError when a setting is not accepted; ResourceError when UCX does not start.
  explicit Context(const LaneSettings& lane);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  ucp_context_h handle() const { return handle_; }
  const std::string& lane() const { return lane_; }
  // "inet" or "inet6", or empty: as in the settings.
  const std::string& address_family() const { return address_family_; }
  const Runtime& runtime() const { return runtime_; }
  // Held while memory is registered or unregistered: UCX itself does not lock there.
  std::mutex& memory_mutex() const { return memory_mutex_; }

 private:
  std::string lane_;
  std::string address_family_;
  Runtime runtime_;
  ucp_context_h handle_ = nullptr;
  mutable std::mutex memory_mutex_;
};

}  // namespace pdx::ucx
