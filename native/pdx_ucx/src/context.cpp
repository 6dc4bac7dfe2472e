#include "pdx/ucx/context.h"

#include <dlfcn.h>

#include <memory>

#include "pdx/ucx/status.h"

namespace pdx::ucx {
namespace {

using Config = std::unique_ptr<ucp_config_t, decltype(&ucp_config_release)>;

Config read_config(const LaneSettings& lane, const Runtime& loaded) {
  ucp_config_t* raw = nullptr;
  check(ucp_config_read(nullptr, nullptr, &raw), "reading the UCX configuration");
  Config config(raw, &ucp_config_release);
  for (const auto& [name, value, optional, fixed] :
       settings_for(lane, loaded.major, loaded.minor)) {
    const ucs_status_t status = ucp_config_modify(config.get(), name.c_str(), value.c_str());
    if (status != UCS_OK && !optional) {
      throw SettingError("UCX_" + name + "=" + value + " is refused by UCX " + loaded.version() +
                         ": " + status_text(status));
    }
  }
  return config;
}

}  // namespace

std::string Runtime::version() const {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

bool Runtime::at_least(unsigned want_major, unsigned want_minor) const {
  return major > want_major || (major == want_major && minor >= want_minor);
}

Runtime runtime() {
  Runtime found{};
  ucp_get_version(&found.major, &found.minor, &found.release);
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&ucp_get_version), &info) != 0 &&
      info.dli_fname != nullptr) {
    found.path = info.dli_fname;
  }
  return found;
}

Context::Context(const LaneSettings& lane)
    : lane_(lane.lane), address_family_(lane.address_family), runtime_(pdx::ucx::runtime()) {
  const Config config = read_config(lane, runtime_);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  // Asks for the oldest interface that has what is used here: ucp_init would ask for that of the
  // headers and make an older library warn.
  const ucs_status_t status = ucp_init_version(1, 13, &params, config.get(), &handle_);
  if (status != UCS_OK) {
    throw ResourceError("starting UCX " + runtime_.version() + " for lane " + lane_ +
                        (lane.net_devices.empty() ? "" : " on " + lane.net_devices) + ": " +
                        status_text(status));
  }
}

Context::~Context() { ucp_cleanup(handle_); }

}  // namespace pdx::ucx
