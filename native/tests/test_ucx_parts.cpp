// The parts that need no connection: bounds, addresses, settings, the completion list.
#include <poll.h>

#include <limits>

#include "pdx/ucx/checksum.h"
#include "pdx/ucx/command_queue.h"
#include "pdx/ucx/generation.h"
#include "ucx_testing.h"

namespace {

using namespace pdx::ucx;
using pdx::testing::throws;

constexpr std::uint64_t kTop = std::numeric_limits<std::uint64_t>::max();
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

void refused(const std::vector<std::int64_t>& row, const std::string& part) {
  const std::vector<Range> source{{4096, 100}};
  const std::vector<Range> destination{{8192, 50}};
  const std::vector<std::int64_t> splits{0, 1};
  CHECK(throws<UsageError>([&] { check_bounds({row, splits}, source, destination); }, part));
}

void bounds_name_what_is_wrong() {
  const std::vector<Range> source{{4096, 100}};
  const std::vector<Range> destination{{8192, 50}};
  const std::vector<std::int64_t> good{0, 50, 0, 0, 50};
  const std::vector<std::int64_t> one{0, 1};
  check_bounds({good, one}, source, destination);
  refused({0, 51, 0, 0, 50}, "source offset 51 and length 50 leave region 0 of 100 bytes");
  refused({0, 0, 0, 1, 50}, "destination offset 1 and length 50 leave region 0 of 50 bytes");
  refused({1, 0, 0, 0, 1}, "source region 1 of 1");
  refused({-1, 0, 0, 0, 1}, "source region -1");
  refused({0, 0, 1, 0, 1}, "destination region 1 of 1");
  refused({0, -1, 0, 0, 1}, "source offset -1");
  refused({0, 0, 0, -1, 1}, "destination offset -1");
  refused({0, 0, 0, 0, 0}, "length 0 is not positive");
  refused({0, 0, 0, 0, -5}, "length -5 is not positive");
  refused({0, 0, 0, 0, kMost}, "leave region");
  refused({0, kMost, 0, 0, kMost}, "leave region");
}

void bounds_do_not_overflow() {
  // The last byte below 2^63 is reachable, the one after is not.
  check_range("region", {kAddressLimit - 10, 10});
  check_range("region", {0, kAddressLimit});
  const auto refuse = [](const Range& range, const std::string& part) {
    CHECK(throws<UsageError>([&] { check_range("region", range); }, part));
  };
  refuse({kAddressLimit - 10, 11}, "address 9223372036854775798 and length 11 leave");
  refuse({1, kAddressLimit}, "end above 2^63");
  refuse({kTop - 4095, 4096}, "end above 2^63");
  refuse({kTop - 9, 11}, "end above 2^63");
  refuse({kAddressLimit, 1}, "end above 2^63");
  refuse({2, kTop}, "end above 2^63");
  refuse({kTop, 0}, "length 0");
  const std::vector<Range> source{{4096, 100}};
  const std::vector<Range> high{{kAddressLimit - 10, 10}};
  const std::vector<std::int64_t> one{0, 1};
  const std::vector<std::int64_t> last{0, 0, 0, 9, 1};
  const std::vector<std::int64_t> past{0, 0, 0, 9, 2};
  const std::vector<Range> wraps{{kAddressLimit - 10, 11}};
  check_bounds({last, one}, source, high);
  CHECK(throws<UsageError>([&] { check_bounds({past, one}, source, high); }, "destination offset"));
  CHECK(throws<UsageError>([&] { check_bounds({last, one}, source, wraps); }, "address space"));
}

void splits_cover_the_runs() {
  const std::vector<Range> range{{4096, 100}};
  const std::vector<std::int64_t> rows{0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
  const auto refuse = [&](const std::vector<std::int64_t>& splits, const std::string& part) {
    CHECK(throws<UsageError>([&] { check_bounds({rows, splits}, range, range); }, part));
  };
  check_bounds({rows, std::vector<std::int64_t>{0, 0, 1, 1, 2}}, range, range);
  refuse({}, "begin with 0");
  refuse({1, 2}, "begin with 0");
  refuse({0, 1}, "end with the number of runs");
  refuse({0, 2, 1, 2}, "splits[2]: 1 is below");
  refuse({0, -1, 2}, "splits[1]: -1 is below");
  const std::vector<std::int64_t> ragged{0, 0, 0};
  const std::vector<std::int64_t> none{0, 0};
  CHECK(throws<UsageError>([&] { check_bounds({ragged, none}, range, range); }, "rows of 5"));
}

void addresses_survive_and_junk_does_not() {
  LaneAddress address;
  address.ucx_major = 1;
  address.ucx_minor = 22;
  address.worker = std::string("wo\0rker", 7);
  address.probe = {{kAddressLimit - 64, 64}, "key"};
  const std::string packed = address.pack();
  const LaneAddress again = LaneAddress::unpack(packed);
  CHECK(again.worker == address.worker && again.probe.rkey == "key");
  CHECK(again.probe.range.address == kAddressLimit - 64 && again.probe.range.length_bytes == 64);
  CHECK(again.version_problem(1, 22).empty());
  CHECK(again.version_problem(1, 13).find("do not interoperate") != std::string::npos);
  const auto refuse = [](const std::string& data, const std::string& part) {
    CHECK(throws<UsageError>([&] { LaneAddress::unpack(data); }, part));
  };
  for (std::size_t length = 0; length < packed.size(); ++length) {
    refuse(packed.substr(0, length), "lane address");
  }
  refuse("XXXX" + packed.substr(4), "PDX2");
  refuse(packed + "x", "checksum of its");
  for (std::size_t bit = 32; bit < 8 * packed.size(); ++bit) {
    std::string changed = packed;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << (bit % 8)));
    refuse(changed, "checksum of its");
  }
}

void addresses_with_a_right_checksum_are_still_read_with_care() {
  LaneAddress address;
  address.worker = "worker";
  const std::string inner = address.pack().substr(8);
  const auto refuse = [](const std::string& fields, const std::string& part) {
    std::string data = "PDX2";
    for (unsigned shift = 0; shift < 32; shift += 8) {
      data.push_back(static_cast<char>((crc32(fields) >> shift) & 0xff));
    }
    CHECK(throws<UsageError>([&] { LaneAddress::unpack(data + fields); }, part));
  };
  std::string huge = inner;
  huge.replace(8, 4, "\xff\xff\xff\xff");
  refuse(huge, "end inside");
  refuse(inner + "x", "follow");
  for (std::size_t length = 0; length < inner.size(); ++length) {
    refuse(inner.substr(0, length), "end inside");
  }
  CHECK(crc32("123456789") == 0xcbf43926U && crc32("") == 0);
}

void hellos_survive_and_cut_ones_do_not() {
  const Hello hello{(std::uint64_t{1} << 40) + 7, "the sender", std::string("a\0worker", 8)};
  const std::string packed = hello.pack();
  const Hello again = Hello::unpack(packed);
  CHECK(again.path == hello.path && again.sender == hello.sender && again.worker == hello.worker);
  for (std::size_t length = 0; length < packed.size() - hello.worker.size(); ++length) {
    CHECK(throws<UsageError>([&] { Hello::unpack(packed.substr(0, length)); }, "end inside"));
  }
}

void remote_keys_look_like_ours() {
  const std::string ours(9, '\0');
  CHECK(rkey_problem(ours, ours).empty());
  for (std::size_t length = 0; length < 32; ++length) {
    CHECK(rkey_problem(ours, std::string(length, '\0')).empty() == (length == 9));
    CHECK(!rkey_problem(ours, std::string(length, '\1')).empty());
  }
  // What follows the head may differ.
  CHECK(rkey_problem(ours + "ab", ours + "cd").empty());
  CHECK(rkey_problem(ours, "junk").find("4 bytes is not one of host memory") != std::string::npos);
}

void settings_are_checked_here() {
  const auto refuse = [](LaneSettings lane, const std::string& part) {
    CHECK(throws<SettingError>([&] { settings_for(lane, 1, 22); }, part));
  };
  refuse({.lane = "rdma", .net_devices = {}, .tcp_port_range = {}}, "lane: 'rdma'");
  refuse({.lane = "tcp", .net_devices = "lo;rm", .tcp_port_range = {}}, "net_device: 'lo;rm'");
  refuse({.lane = "cma", .net_devices = "lo,nosuch0", .tcp_port_range = {}}, "'nosuch0' in");
  refuse({.lane = "tcp", .net_devices = "../net/lo", .tcp_port_range = {}}, "net_device");
  for (const char* ports : {"x", "1", "5-1", "0-5", "1-70000", "1-2x"}) {
    refuse({.lane = "tcp", .net_devices = {}, .tcp_port_range = ports}, "tcp_port_range");
  }
  refuse({.lane = "tcp", .net_devices = {}, .address_family = "4", .tcp_port_range = {}},
         "address_family: '4'");
  LaneSettings late;
  late.tcp_user_timeout_s = std::numeric_limits<double>::quiet_NaN();
  refuse(late, "tcp_user_timeout_s");
  const auto value = [](const std::vector<Setting>& all, const std::string& name) {
    for (const auto& setting : all) {
      if (setting.name == name) {
        return setting.value;
      }
    }
    return std::string();
  };
  const LaneSettings tcp{.lane = "tcp", .net_devices = "lo", .tcp_port_range = "20000-20100"};
  const auto all = settings_for(tcp, 1, 22);
  CHECK(value(all, "RNDV_THRESH") == "inf" && value(all, "PROTO_EMULATION_ENABLE") == "n");
  CHECK(value(all, "TCP_CONN_NB") == "y");
  CHECK(value(all, "TLS") == "tcp" && value(all, "NET_DEVICES") == "lo");
  CHECK(value(all, "TCP_USER_TIMEOUT") == "5.000s");
  // Unknown there.
  CHECK(value(settings_for(tcp, 1, 13), "PROTO_EMULATION_ENABLE").empty());
  setenv("UCX_RNDV_THRESH", "64K", 1);
  CHECK(value(settings_for(tcp, 1, 22), "RNDV_THRESH").empty());
  unsetenv("UCX_RNDV_THRESH");
  // Addresses have the form that is checked, whatever the environment says.
  setenv("UCX_ADDRESS_VERSION", "v2", 1);
  CHECK(value(settings_for(tcp, 1, 22), "ADDRESS_VERSION") == "v1");
  unsetenv("UCX_ADDRESS_VERSION");
}

void transports_are_those_asked_for() {
  CHECK(transports_problem("tcp", "tcp/lo tcp/eth0").empty());
  CHECK(transports_problem("cma", "tcp/lo cma/memory").empty());
  CHECK(!transports_problem("tcp", "tcp/lo cma/memory").empty());
  CHECK(!transports_problem("cma", "tcp/lo").empty());
  CHECK(!transports_problem("cma", "").empty());
}

void completions_are_told_once() {
  CompletionList list;
  pollfd entry{list.fileno(), POLLIN, 0};
  CHECK(poll(&entry, 1, 0) == 0 && list.drain().empty());
  for (std::uint64_t i = 0; i < 3; ++i) {
    list.push({.event = Event::Posted, .ticket = i, .data = {}, .error = {}});
  }
  CHECK(poll(&entry, 1, 0) == 1);
  const auto told = list.drain();
  CHECK(told.size() == 3 && told[0].ticket == 0 && told[2].ticket == 2);
  CHECK(poll(&entry, 1, 0) == 0 && list.drain().empty());
  CHECK(!list.wait(0.0));
}

void gates_close_before_the_queue() {
  CommandQueue queue;
  CHECK(!queue.push_for_path(1, [] {}));
  queue.open_gate(1);
  CHECK(queue.push_for_path(1, [] {}));
  queue.close_gate(1);
  CHECK(!queue.push_for_path(1, [] {}));
  CHECK(!queue.sleep() && queue.take().size() == 1 && queue.sleep());
  pollfd entry{queue.fileno(), POLLIN, 0};
  CHECK(poll(&entry, 1, 0) == 0);
  CHECK(queue.push([] {}) && poll(&entry, 1, 0) == 1);
  queue.awake();
  CHECK(poll(&entry, 1, 0) == 0);
  queue.stop();
  CHECK(!queue.push([] {}));
}

void tombstones_forget_the_oldest() {
  Tombstones dead(2);
  dead.add(1, "first");
  dead.add(2, "second");
  dead.add(1, "again");
  CHECK(*dead.find(1) == "first");
  dead.add(3, "third");
  CHECK(dead.find(1) == nullptr && *dead.find(2) == "second" && *dead.find(3) == "third");
}

}  // namespace

int main() {
  bounds_name_what_is_wrong();
  bounds_do_not_overflow();
  splits_cover_the_runs();
  addresses_survive_and_junk_does_not();
  addresses_with_a_right_checksum_are_still_read_with_care();
  hellos_survive_and_cut_ones_do_not();
  remote_keys_look_like_ours();
  settings_are_checked_here();
  transports_are_those_asked_for();
  completions_are_told_once();
  gates_close_before_the_queue();
  tombstones_forget_the_oldest();
  return 0;
}
