#include "pdx/ucx/worker_address.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "pdx/ucx/status.h"

namespace pdx::ucx {
namespace {

// Version 1 in the low half, and the flag "worker id" in the high one: UCX sets no other for an
// address that an application asks for, unless UCX_ADDRESS_DEBUG_INFO or a client id is asked for.
constexpr unsigned kHeader = 0x20;
// In the byte of a memory domain: the number, and "a device without transports".
constexpr unsigned kDomainNumber = 0x1f;
constexpr unsigned kDomainEmpty = 0x80;
// In the byte of a device's length.
constexpr unsigned kDeviceLength = 0x1f;
constexpr unsigned kDeviceSystem = 0x20;
constexpr unsigned kDevicePaths = 0x40;
// In the byte of an interface's length; the last one of its device has kLast. 0x40 would announce
// endpoint addresses, which no worker's address has.
constexpr unsigned kInterfaceLength = 0x3f;
constexpr unsigned kLast = 0x80;
// UCX makes room for so many transports.
constexpr std::size_t kEntriesMax = 128;
constexpr std::size_t kReleases = 16;
// The priority of the device, in the attributes' word of capabilities; it differs between devices.
constexpr std::uint32_t kPriority = 0xff;

// UCX's checksums of the names of the transports that the lanes use.
constexpr std::uint16_t kTcp = 0x19cf;
constexpr std::uint16_t kCma = 0x8b47;

// A tcp device address: flags, address family, and what the two call for.
constexpr unsigned kTcpLoopback = 1;
constexpr unsigned kInet = 2;
constexpr unsigned kInet6 = 10;
constexpr std::size_t kTcpHead = 2;
constexpr std::size_t kTcpLoopbackBytes = 12;
constexpr std::size_t kTcpPortBytes = 2;
// A cma device address is the host; its interface address a process id, with the namespace of the
// ids behind it where the highest bit of the id says so.
constexpr std::size_t kCmaHostBytes = 8;
constexpr std::size_t kCmaPidBytes = 4;
constexpr unsigned kCmaNamespace = 0x80;

// What devices really are; far outside it the sums that UCX makes of them are not numbers any more.
constexpr float kSlowestBytesPerS = 1e3F;
constexpr float kFastestBytesPerS = 1e15F;
constexpr float kLongestS = 10.0F;

class Reader {
 public:
  explicit Reader(std::string_view data) : data_(data) {}

  [[noreturn]] void refuse(const std::string& what) const {
    throw UsageError("UCX worker address of " + std::to_string(data_.size()) + " bytes: " + what +
                     " at byte " + std::to_string(at_));
  }

  std::string_view bytes(std::size_t count) {
    if (count > data_.size() - at_) {
      refuse("it ends inside a field");
    }
    at_ += count;
    return data_.substr(at_ - count, count);
  }

  unsigned byte() { return static_cast<unsigned char>(bytes(1)[0]); }

  // UCX writes numbers as its machine has them; it runs on little-endian ones only.
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, bytes(sizeof value).data(), sizeof value);
    return value;
  }

  bool at_end() const { return at_ == data_.size(); }

 private:
  std::string_view data_;
  std::size_t at_ = 0;
};

unsigned byte_of(std::string_view text, std::size_t at) {
  return static_cast<unsigned char>(text[at]);
}

// Whether a tcp address names one socket.
bool is_tcp(const WorkerAddress::Entry& entry) {
  const std::string& device = entry.device;
  if (device.size() < kTcpHead || entry.interface.size() != kTcpPortBytes ||
      entry.interface == std::string(kTcpPortBytes, '\0')) {
    return false;
  }
  const unsigned flags = byte_of(device, 0);
  const unsigned family = byte_of(device, 1);
  if (flags == kTcpLoopback) {
    return (family == kInet || family == kInet6) && device.size() == kTcpHead + kTcpLoopbackBytes;
  }
  return flags == 0 && ((family == kInet && device.size() == kTcpHead + 4) ||
                        (family == kInet6 && device.size() == kTcpHead + 16));
}

bool is_cma(const WorkerAddress::Entry& entry) {
  if (entry.device.size() != kCmaHostBytes || entry.interface.size() < kCmaPidBytes) {
    return false;
  }
  const bool has_namespace = (byte_of(entry.interface, kCmaPidBytes - 1) & kCmaNamespace) != 0;
  return has_namespace == (entry.interface.size() > kCmaPidBytes);
}

bool within(float value, float least, float most) {
  return std::isfinite(value) && value >= least && value <= most;
}

std::uint32_t read_attributes(Reader& reader) {
  const auto overhead_s = reader.number<float>();
  const auto bytes_per_s = reader.number<float>();
  const auto latency_s = reader.number<float>();
  if (!within(overhead_s, 0, kLongestS) || !within(latency_s, 0, kLongestS) ||
      !within(bytes_per_s, kSlowestBytesPerS, kFastestBytesPerS)) {
    reader.refuse("overhead, bandwidth or latency is none of a device");
  }
  return reader.number<std::uint32_t>() & ~kPriority;
}

// The transports on one device.
void read_transports(Reader& reader, std::string_view device, WorkerAddress& into) {
  for (bool last = false; !last;) {
    if (into.entries.size() == kEntriesMax) {
      reader.refuse("more than " + std::to_string(kEntriesMax) + " transports");
    }
    WorkerAddress::Entry entry;
    entry.device = std::string(device);
    entry.transport = reader.number<std::uint16_t>();
    entry.capabilities = read_attributes(reader);
    const unsigned length = reader.byte();
    last = (length & kLast) != 0;
    if ((length & ~kLast) > kInterfaceLength) {
      reader.refuse("endpoint addresses, which a worker's address has not,");
    }
    entry.interface = std::string(reader.bytes(length & kInterfaceLength));
    if (!(entry.transport == kTcp && is_tcp(entry)) &&
        !(entry.transport == kCma && is_cma(entry))) {
      reader.refuse("neither a tcp nor a cma address ends");
    }
    into.entries.push_back(std::move(entry));
  }
}

// True when it was the last one.
bool read_device(Reader& reader, WorkerAddress& into) {
  const unsigned domain = reader.byte();
  const unsigned length = reader.byte();
  const bool last = (length & kLast) != 0;
  if ((domain & kDomainEmpty) != 0) {
    if (length != kLast || (domain & ~kDomainEmpty) >= kReleases) {
      reader.refuse("a device without transports that does not end the address");
    }
    into.release = static_cast<int>(domain & ~kDomainEmpty);
    return true;
  }
  if ((domain & ~kDomainNumber) != 0 || (length & kDevicePaths) != 0) {
    reader.refuse("flags of a device that tcp and cma have not,");
  }
  if ((length & kDeviceSystem) != 0) {
    reader.byte();
  }
  const std::string_view device = reader.bytes(length & kDeviceLength);
  read_transports(reader, device, into);
  return last;
}

bool has(const std::vector<WorkerAddress::Entry>& entries, const WorkerAddress::Entry& like) {
  return std::any_of(entries.begin(), entries.end(), [&](const WorkerAddress::Entry& entry) {
    return entry.transport == like.transport && entry.capabilities == like.capabilities &&
           entry.interface.size() == like.interface.size();
  });
}

}  // namespace

static_assert(std::endian::native == std::endian::little, "as UCX's packed numbers");

WorkerAddress WorkerAddress::parse(std::string_view packed) {
  Reader reader(packed);
  if (reader.byte() != kHeader) {
    reader.refuse("version or flags are not those of a worker's address, version 1,");
  }
  WorkerAddress address;
  address.worker = reader.number<std::uint64_t>();
  while (!read_device(reader, address)) {
  }
  if (!reader.at_end()) {
    reader.refuse("bytes follow the last device");
  }
  if (address.entries.empty()) {
    reader.refuse("no transport");
  }
  return address;
}

std::string WorkerAddress::families() const {
  bool inet = false;
  bool inet6 = false;
  for (const Entry& entry : entries) {
    if (entry.transport == kTcp) {
      inet = inet || byte_of(entry.device, 1) == kInet;
      inet6 = inet6 || byte_of(entry.device, 1) == kInet6;
    }
  }
  return inet && inet6 ? "inet,inet6" : inet ? "inet" : inet6 ? "inet6" : "";
}

std::string WorkerAddress::problem(std::string_view theirs, const WorkerAddress& ours) {
  WorkerAddress address;
  try {
    address = parse(theirs);
  } catch (const UsageError& error) {
    return error.what();
  }
  if (address.worker == ours.worker) {
    return "UCX worker address: it is that of the very worker that shall connect to it";
  }
  if (address.release != ours.release) {
    return "UCX worker address: it is of UCX release " + std::to_string(address.release) +
           " (minor version modulo 16), here it is " + std::to_string(ours.release);
  }
  const std::string here = ours.families();
  const std::string there = address.families();
  if (here.find(',') == std::string::npos && there.find(',') == std::string::npos &&
      here != there) {
    return "UCX worker address: the peer's lane listens on " + there + " and this one on " + here +
           "; bind addresses of one family on both sides";
  }
  for (const Entry& entry : address.entries) {
    if (!has(ours.entries, entry)) {
      return "UCX worker address: a transport in it has a name, capabilities or an address that "
             "none of this lane here has";
    }
  }
  return {};
}

}  // namespace pdx::ucx
