// CRC-32 of what a peer tells us, so that UCX is never given bytes that were cut off or changed.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

namespace pdx::ucx {

namespace detail {

constexpr std::array<std::uint32_t, 256> crc32_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value >> 1) ^ ((value & 1) != 0 ? 0xedb88320U : 0U);
    }
    table[i] = value;
  }
  return table;
}

}  // namespace detail

// As zlib's crc32.
constexpr std::uint32_t crc32(std::string_view data) {
  constexpr auto kTable = detail::crc32_table();
  std::uint32_t value = 0xffffffffU;
  for (const char byte : data) {
    value = (value >> 8) ^ kTable[(value ^ static_cast<unsigned char>(byte)) & 0xff];
  }
  return value ^ 0xffffffffU;
}

}  // namespace pdx::ucx
