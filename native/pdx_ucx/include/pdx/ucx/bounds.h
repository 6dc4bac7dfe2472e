// The bounds of a post, checked before any of its puts. Pure; no UCX.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace pdx::ucx {

// Where memory of a process ends at the latest. UCX looks for registrations in its cache page by
// page up to the end of a range; of one that holds the last page that end wraps around, and the
// search never returns.
inline constexpr std::uint64_t kAddressLimit = std::uint64_t{1} << 63;

// A range of memory: [address, address + length_bytes), none of it above kAddressLimit.
struct Range {
  std::uint64_t address;
  std::uint64_t length_bytes;
};

// Columns of a run: source region, source offset, destination region, destination offset, length.
inline constexpr std::size_t kRunColumns = 5;

// Runs of one post, row-major [rows, 5], and where its batches begin and end: batch b is rows
// [splits[b], splits[b + 1]).
struct RunTable {
  std::span<const std::int64_t> values;
  std::span<const std::int64_t> splits;

  std::size_t rows() const { return values.size() / kRunColumns; }
};

// Throws UsageError naming the row, the field, the value and the limit when a range ends above the
// limit, a run is empty or leaves its region on either side, or the splits do not cover the rows in
// order. Cost: one pass; 64-bit unsigned comparisons that cannot overflow.
void check_bounds(const RunTable& runs, std::span<const Range> source,
                  std::span<const Range> destination);

// Throws UsageError when the range is empty or ends above kAddressLimit.
void check_range(const std::string& what, const Range& range);

}  // namespace pdx::ucx
