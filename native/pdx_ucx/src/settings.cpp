#include "pdx/ucx/settings.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <system_error>

#include "pdx/ucx/status.h"

namespace pdx::ucx {
namespace {

// UCX itself only warns about an unknown device and goes on without it.
void require_devices(const std::string& value) {
  std::istringstream names(value);
  for (std::string name; std::getline(names, name, ',');) {
    const bool plain = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
             std::string_view("_.:-@").find(c) != std::string_view::npos;
    });
    // Names with a port are those of RDMA devices.
    const bool network = name.find(':') == std::string::npos;
    std::error_code ignored;
    if (!plain || (network && !std::filesystem::exists("/sys/class/net/" + name, ignored))) {
      throw SettingError("net_device: '" + name + "' in '" + value +
                         "' is not a network device of this machine; /sys/class/net lists them");
    }
  }
}

void require_port_range(const std::string& value) {
  unsigned first = 0;
  unsigned last = 0;
  char rest = 0;
  if (std::sscanf(value.c_str(), "%u-%u%c", &first, &last, &rest) != 2 || first == 0 ||
      first > last || last > 65535) {
    throw SettingError("tcp_port_range: '" + value +
                       "' is not a range of ports, such as 20000-20100");
  }
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3fs", value);
  return text;
}

void validate(const LaneSettings& lane) {
  if (lane.lane != "tcp" && lane.lane != "cma") {
    throw SettingError("lane: '" + lane.lane + "' is not a UCX lane of this build; use tcp or cma");
  }
  require_devices(lane.net_devices);
  if (!lane.address_family.empty() && lane.address_family != "inet" &&
      lane.address_family != "inet6") {
    throw SettingError("address_family: '" + lane.address_family + "' is neither inet nor inet6");
  }
  if (!lane.tcp_port_range.empty()) {
    require_port_range(lane.tcp_port_range);
  }
  if (!(lane.tcp_user_timeout_s >= 0.1 && lane.tcp_user_timeout_s <= 3600.0)) {
    throw SettingError("tcp_user_timeout_s: " + std::to_string(lane.tcp_user_timeout_s) +
                       " is not between 0.1 and 3600");
  }
}

void add_newer(std::vector<Setting>& all, const LaneSettings& lane, unsigned major,
               unsigned minor) {
  // 1.13 knows neither and warns about unknown names at each worker.
  if (major > 1 || minor >= 17) {
    // Without it a put that has no zero-copy protocol silently becomes 8 KiB messages.
    all.push_back({"PROTO_EMULATION_ENABLE", "n", true});
    all.push_back({"TCP_USER_TIMEOUT", seconds(lane.tcp_user_timeout_s), true});
  }
}

}  // namespace

std::vector<Setting> settings_for(const LaneSettings& lane, unsigned ucx_major,
                                  unsigned ucx_minor) {
  validate(lane);
  std::vector<Setting> all;
  // Rendezvous is never used; while it is on, endpoints with peer error handling get no
  // zero-copy put.
  all.push_back({"RNDV_THRESH", "inf"});
  all.push_back({"KEEPALIVE_INTERVAL", "1s"});
  all.push_back({"TCP_KEEPIDLE", "2s"});
  all.push_back({"TCP_KEEPINTVL", "1s"});
  all.push_back({"TCP_KEEPCNT", "3"});
  // A connection is made while the thread goes on: one to a host that does not answer would hold up
  // every path. And UCX 1.22 ends the process when a peer that has just begun to close resets a
  // connection that is made at once.
  all.push_back({"TCP_CONN_NB", "y"});
  // Addresses from outside are read before UCX is given them, so they have one form. Older ones
  // have this form only.
  if (ucx_major > 1 || ucx_minor >= 13) {
    all.push_back({"ADDRESS_VERSION", "v1", true, true});
  }
  all.push_back({"ADDRESS_DEBUG_INFO", "n", true, true});
  all.push_back({"UNIFIED_MODE", "n", true, true});
  add_newer(all, lane, ucx_major, ucx_minor);
  if (lane.lane == "cma") {
    // Messages and liveness by tcp (a killed peer is seen at once, a zombie too); puts cannot go
    // by tcp, so they go by cma or fail.
    all.push_back({"TLS", "cma,tcp"});
    all.push_back({"TCP_PUT_ENABLE", "n"});
    all.push_back({"CMA_MEMORY_INVALIDATE", "y"});
  } else {
    all.push_back({"TLS", "tcp"});
  }
  if (!lane.net_devices.empty()) {
    all.push_back({"NET_DEVICES", lane.net_devices});
  }
  if (!lane.address_family.empty()) {
    all.push_back({"TCP_AF_PRIO", lane.address_family});
  }
  if (!lane.tcp_port_range.empty()) {
    all.push_back({"TCP_PORT_RANGE", lane.tcp_port_range});
  }
  std::erase_if(all, [](const Setting& setting) {
    return !setting.fixed && std::getenv(("UCX_" + setting.name).c_str()) != nullptr;
  });
  return all;
}

std::string transports_problem(const std::string& lane, const std::string& transports) {
  std::istringstream words(transports);
  bool has_cma = false;
  for (std::string word; words >> word;) {
    const std::string name = word.substr(0, word.find('/'));
    has_cma = has_cma || name == "cma";
    if (lane == "tcp" && name != "tcp") {
      return "lane tcp was asked for, but UCX uses " + transports +
             "; unset UCX_TLS or set it to tcp";
    }
  }
  if (lane == "cma" && !has_cma) {
    return "lane cma was asked for, but UCX uses " + transports +
           "; cma needs both processes on one host, under one uid and allowed to ptrace each "
           "other (containers: a shared pid namespace and CAP_SYS_PTRACE)";
  }
  return {};
}

}  // namespace pdx::ucx
