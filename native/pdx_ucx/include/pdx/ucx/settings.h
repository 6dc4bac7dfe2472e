// Which UCX settings a lane runs with, and why.
#pragma once
#include <string>
#include <vector>

namespace pdx::ucx {

// What the owner of an engine may choose.
struct LaneSettings {
  // "tcp" or "cma".
  std::string lane = "tcp";
  // UCX_NET_DEVICES, e.g. "lo" or "eth0,eth1"; empty: every device.
  std::string net_devices;
  // "inet" or "inet6": the one family of the addresses that UCX listens on; empty: IPv4 where a
  // device has an address of it, else IPv6.
  std::string address_family{};
  // UCX_TCP_PORT_RANGE, e.g. "20000-20100"; empty: any port.
  std::string tcp_port_range;
  // How long sent bytes may stay unacknowledged before the connection is given up. Above the
  // longest pause that a healthy peer may have.
  double tcp_user_timeout_s = 5.0;
};

struct Setting {
  std::string name;
  std::string value;
  // Left out, not refused, where this UCX does not know it.
  bool optional = false;
  // Not left to the environment.
  bool fixed = false;
};

// The settings for this lane, names without `UCX_`. Those whose UCX_ variable is set in the
// environment are left out: the user's word counts, except where a setting is fixed.
// Raises: SettingError naming the setting, its value and what it may be.
std::vector<Setting> settings_for(const LaneSettings& lane, unsigned ucx_major, unsigned ucx_minor);

// Empty when `transports` ("tcp/lo cma/memory") are those that `lane` promises, else what is wrong.
std::string transports_problem(const std::string& lane, const std::string& transports);

}  // namespace pdx::ucx
