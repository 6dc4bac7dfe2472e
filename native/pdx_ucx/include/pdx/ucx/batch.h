// Runs posted together: one future with one status.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pdx/ucx/bounds.h"
#include "pdx/ucx/region.h"

namespace pdx::ucx {

class Generation;
struct Batch;

// The regions that the batches of one post name by position.
struct PostRegions {
  std::vector<std::shared_ptr<Region>> source;
  std::vector<RemoteRange> destination;
  // Unpacked for the endpoint when the first run needs it.
  std::vector<std::shared_ptr<RemoteKey>> keys;
};

// One put. A run longer than kPieceBytes is several, so that an abort never waits for a long copy.
struct Piece {
  std::uint64_t source;
  std::uint64_t destination;
  std::uint64_t length_bytes;
  std::uint32_t source_region;
  std::uint32_t destination_region : 31;
  // The last piece of its run.
  std::uint32_t ends_run : 1;
  // UCX hands the piece back in the callback; it finds the rest from here.
  Batch* batch;
};

inline constexpr std::uint64_t kPieceBytes = std::uint64_t{4} << 20;

// Lives until every put has completed and the flush has; then it is reported and swept.
// Threads: built by the caller, then the progress thread only.
struct Batch {
  std::uint64_t ticket = 0;
  Generation* generation = nullptr;
  std::shared_ptr<PostRegions> regions;
  std::vector<Piece> pieces;
  // Pieces before it were posted or dropped.
  std::size_t cursor = 0;
  std::uint64_t in_flight = 0;
  std::uint64_t bytes_done = 0;
  std::uint64_t runs_done = 0;
  bool posted_any = false;
  bool flush_started = false;
  bool flush_pending = false;
  bool finished = false;
  // First error of any put or the flush.
  std::string error;

  bool unposted() const { return cursor < pieces.size(); }
  void fail(const std::string& text);
};

// The batches of a post whose bounds were checked. Tickets count up from `first_ticket`.
std::vector<std::unique_ptr<Batch>> make_batches(const RunTable& runs,
                                                 std::shared_ptr<PostRegions> regions,
                                                 std::uint64_t first_ticket);

}  // namespace pdx::ucx
