#include "pdx/ucx/lane_address.h"

#include <cstring>

#include "pdx/ucx/checksum.h"
#include "pdx/ucx/status.h"

namespace pdx::ucx {
namespace {

constexpr char kMagic[4] = {'P', 'D', 'X', '2'};

// Little-endian on the wire, whatever the host.
template <typename T>
void put(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    out.push_back(static_cast<char>((value >> (8 * i)) & 0xff));
  }
}

// Magic and checksum.
constexpr std::size_t kHeaderBytes = sizeof kMagic + sizeof(std::uint32_t);

class Reader {
 public:
  explicit Reader(const std::string& data) : data_(data) {}

  std::string bytes(std::size_t count) {
    if (count > data_.size() - at_) {
      throw UsageError("lane address: " + std::to_string(data_.size()) +
                       " bytes end inside a field");
    }
    at_ += count;
    return data_.substr(at_ - count, count);
  }

  template <typename T>
  T number() {
    T value = 0;
    const std::string raw = bytes(sizeof(T));
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      value = static_cast<T>(
          value | static_cast<T>(static_cast<T>(static_cast<unsigned char>(raw[i])) << (8 * i)));
    }
    return value;
  }

  bool at_end() const { return at_ == data_.size(); }

 private:
  const std::string& data_;
  std::size_t at_ = 0;
};

}  // namespace

std::string LaneAddress::pack() const {
  std::string out;
  put(out, static_cast<std::uint32_t>(ucx_major));
  put(out, static_cast<std::uint32_t>(ucx_minor));
  put(out, static_cast<std::uint32_t>(worker.size()));
  out += worker;
  put(out, probe.range.address);
  put(out, probe.range.length_bytes);
  put(out, static_cast<std::uint32_t>(probe.rkey.size()));
  out += probe.rkey;
  std::string frame(kMagic, sizeof kMagic);
  put(frame, crc32(out));
  return frame + out;
}

LaneAddress LaneAddress::unpack(const std::string& data) {
  Reader reader(data);
  if (reader.bytes(sizeof kMagic) != std::string(kMagic, sizeof kMagic)) {
    throw UsageError("lane address: does not begin with PDX2");
  }
  // UCX takes no length with an address and follows whatever stands in it: only whole ones go in.
  if (reader.number<std::uint32_t>() != crc32(std::string_view(data).substr(kHeaderBytes))) {
    throw UsageError("lane address: the checksum of its " + std::to_string(data.size()) +
                     " bytes is wrong; it was cut off or changed on its way");
  }
  LaneAddress address;
  address.ucx_major = reader.number<std::uint32_t>();
  address.ucx_minor = reader.number<std::uint32_t>();
  address.worker = reader.bytes(reader.number<std::uint32_t>());
  address.probe.range.address = reader.number<std::uint64_t>();
  address.probe.range.length_bytes = reader.number<std::uint64_t>();
  address.probe.rkey = reader.bytes(reader.number<std::uint32_t>());
  if (!reader.at_end() || address.worker.empty()) {
    throw UsageError("lane address: a field is missing or bytes follow the last one");
  }
  if (!address.probe.rkey.empty()) {
    check_range("lane address: probe", address.probe.range);
  }
  return address;
}

std::string LaneAddress::version_problem(unsigned our_major, unsigned our_minor) const {
  if (ucx_major == our_major && ucx_minor == our_minor) {
    return {};
  }
  const auto text = [](unsigned major, unsigned minor) {
    return std::to_string(major) + "." + std::to_string(minor);
  };
  return "UCX " + text(our_major, our_minor) + " here and " + text(ucx_major, ucx_minor) +
         " at the peer do not interoperate; install the same major.minor on both";
}

std::string Hello::pack() const {
  std::string out;
  put(out, path);
  put(out, static_cast<std::uint32_t>(sender.size()));
  return out + sender + worker;
}

Hello Hello::unpack(const std::string& data) {
  Reader reader(data);
  Hello hello;
  hello.path = reader.number<std::uint64_t>();
  hello.sender = reader.bytes(reader.number<std::uint32_t>());
  hello.worker = data.substr(sizeof hello.path + sizeof(std::uint32_t) + hello.sender.size());
  return hello;
}

std::string pack_welcome(std::uint64_t path) {
  std::string out;
  put(out, path);
  return out;
}

}  // namespace pdx::ucx
