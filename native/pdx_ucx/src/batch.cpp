#include "pdx/ucx/batch.h"

#include <algorithm>
#include <utility>

namespace pdx::ucx {
namespace {

void add_pieces(Batch& batch, std::span<const std::int64_t> run) {
  const auto source_region = static_cast<std::uint32_t>(run[0]);
  const auto destination_region = static_cast<std::uint32_t>(run[2]);
  Piece piece{
      .source = batch.regions->source[source_region]->range().address +
                static_cast<std::uint64_t>(run[1]),
      .destination = batch.regions->destination[destination_region].range.address +
                     static_cast<std::uint64_t>(run[3]),
      .length_bytes = 0,
      .source_region = source_region,
      .destination_region = destination_region & 0x7fffffffU,
      .ends_run = 0,
      .batch = &batch,
  };
  for (auto left = static_cast<std::uint64_t>(run[4]); left > 0;) {
    piece.length_bytes = std::min(left, kPieceBytes);
    left -= piece.length_bytes;
    piece.ends_run = left == 0 ? 1U : 0U;
    batch.pieces.push_back(piece);
    piece.source += piece.length_bytes;
    piece.destination += piece.length_bytes;
  }
}

}  // namespace

void Batch::fail(const std::string& text) {
  if (error.empty()) {
    error = text;
  }
}

std::vector<std::unique_ptr<Batch>> make_batches(const RunTable& runs,
                                                 std::shared_ptr<PostRegions> regions,
                                                 std::uint64_t first_ticket) {
  std::vector<std::unique_ptr<Batch>> batches;
  batches.reserve(runs.splits.size() - 1);
  for (std::size_t i = 0; i + 1 < runs.splits.size(); ++i) {
    auto batch = std::make_unique<Batch>();
    batch->ticket = first_ticket + i;
    batch->regions = regions;
    const auto first = static_cast<std::size_t>(runs.splits[i]);
    const auto last = static_cast<std::size_t>(runs.splits[i + 1]);
    batch->pieces.reserve(last - first);
    for (std::size_t row = first; row < last; ++row) {
      add_pieces(*batch, runs.values.subspan(row * kRunColumns, kRunColumns));
    }
    batches.push_back(std::move(batch));
  }
  return batches;
}

}  // namespace pdx::ucx
