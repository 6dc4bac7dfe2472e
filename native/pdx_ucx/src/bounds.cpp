#include "pdx/ucx/bounds.h"

#include "pdx/ucx/status.h"

namespace pdx::ucx {
namespace {

[[noreturn]] void refuse(std::size_t row, const std::string& what) {
  throw UsageError("run " + std::to_string(row) + ": " + what + "; nothing of this post was sent");
}

// `side` is "source" or "destination"; region, offset are columns of the row.
void check_side(std::size_t row, const char* side, std::int64_t region, std::int64_t offset,
                std::uint64_t length, std::span<const Range> ranges) {
  if (region < 0 || static_cast<std::uint64_t>(region) >= ranges.size()) {
    refuse(row, std::string(side) + " region " + std::to_string(region) + " of " +
                    std::to_string(ranges.size()));
  }
  const std::uint64_t limit = ranges[static_cast<std::size_t>(region)].length_bytes;
  if (offset < 0 || static_cast<std::uint64_t>(offset) > limit ||
      length > limit - static_cast<std::uint64_t>(offset)) {
    refuse(row, std::string(side) + " offset " + std::to_string(offset) + " and length " +
                    std::to_string(length) + " leave region " + std::to_string(region) + " of " +
                    std::to_string(limit) + " bytes");
  }
}

void check_splits(std::span<const std::int64_t> splits, std::size_t rows) {
  if (splits.empty() || splits.front() != 0 || static_cast<std::uint64_t>(splits.back()) != rows) {
    throw UsageError("splits: must begin with 0 and end with the number of runs, " +
                     std::to_string(rows));
  }
  for (std::size_t i = 1; i < splits.size(); ++i) {
    if (splits[i] < splits[i - 1]) {
      throw UsageError("splits[" + std::to_string(i) + "]: " + std::to_string(splits[i]) +
                       " is below the one before it, " + std::to_string(splits[i - 1]));
    }
  }
}

}  // namespace

void check_range(const std::string& what, const Range& range) {
  if (range.length_bytes == 0) {
    throw UsageError(what + ": length 0; a region has at least one byte");
  }
  if (range.address > kAddressLimit || range.length_bytes > kAddressLimit - range.address) {
    throw UsageError(what + ": address " + std::to_string(range.address) + " and length " +
                     std::to_string(range.length_bytes) +
                     " leave the address space of a process; they end above 2^63");
  }
}

void check_bounds(const RunTable& runs, std::span<const Range> source,
                  std::span<const Range> destination) {
  if (runs.values.size() % kRunColumns != 0) {
    throw UsageError("runs: " + std::to_string(runs.values.size()) + " values are no rows of 5");
  }
  check_splits(runs.splits, runs.rows());
  for (std::size_t i = 0; i < source.size(); ++i) {
    check_range("source region " + std::to_string(i), source[i]);
  }
  for (std::size_t i = 0; i < destination.size(); ++i) {
    check_range("destination region " + std::to_string(i), destination[i]);
  }
  for (std::size_t row = 0; row < runs.rows(); ++row) {
    const auto run = runs.values.subspan(row * kRunColumns, kRunColumns);
    if (run[4] <= 0) {
      refuse(row, "length " + std::to_string(run[4]) + " is not positive");
    }
    const auto length = static_cast<std::uint64_t>(run[4]);
    check_side(row, "source", run[0], run[1], length, source);
    check_side(row, "destination", run[2], run[3], length, destination);
  }
}

}  // namespace pdx::ucx
