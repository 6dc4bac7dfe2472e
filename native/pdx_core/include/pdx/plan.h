// How page pairs turn into runs: the one planner, for every pair of layouts.
//
// A compiled Plan holds matched plane pairs. A request (page ids, token ranges) is walked into
// segments: rows that lie in one source page and in one destination page. Every segment of the same
// shape (first row on both sides, row count, layers) shares one program: the merged runs of that
// shape relative to the pages' bases. Emitting is program entries times segments.
//
// All offsets and lengths are bytes from the start of a region, checked int64: compile proves that
// the last cell of every plane lies inside its region, so a checked page id can never overflow.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "pdx/outline.h"
#include "pdx/run_buffer.h"

namespace pdx {

// A bound of pdxfer.limits was reached.
struct LimitError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What the rows of a plane are.
enum class Rows : std::int64_t {
  kToken = 0,  // one row a token, `page_size` rows a page
  kWhole = 1,  // the row count is the plane's own and all rows move together
  kTile = 2,   // no rows: (page, head) is one opaque cell, moved whole
};

// Where a group's pages are on one side.
struct SideSpec {
  std::int64_t page_size;  // tokens
  std::int64_t pages;      // valid ids are reserved_pages <= id < pages
  std::int64_t reserved_pages;
};

struct GroupSpec {
  std::string name;
  SideSpec source;
  SideSpec destination;
};

// The address formula of one side of a plane pair: base + page * page_stride + row * row_stride +
// head * head_stride, head counted from the first head of the pair.
struct PlaneSide {
  std::int64_t region;
  std::int64_t base;
  std::int64_t page_stride;
  std::int64_t row_stride;
  std::int64_t head_stride;
};

// The cells of one (group, part, layer) that a source plane and a destination plane share.
struct PlanePair {
  std::int64_t group;
  std::int64_t layer;
  Rows rows_kind;
  std::int64_t rows;  // of one page: kWhole the outer count; kTile 1; kToken not used
  std::int64_t heads;
  std::int64_t cell_bytes;
  PlaneSide source;
  PlaneSide destination;
};

struct PlanLimits {
  std::int64_t runs_per_page_max;  // pieces that one segment may be cut into
  std::int64_t runs_max;           // runs of one request
};

// Page ids of one side of a request; row 0 of the first page is token `first_token`.
struct PageList {
  const std::int64_t* ids;
  std::size_t count;
  std::int64_t first_token;
};

// Tokens [first, end) of one group; the end is rounded up to the page end where both sides' pages
// cover the same tokens.
struct GroupRequest {
  std::size_t group;
  PageList source;
  PageList destination;
  std::int64_t first;
  std::int64_t end;
};

// The runs of a request; batch b is rows [splits[b], splits[b + 1]).
struct Batches {
  RunBuffer runs;
  std::vector<std::int64_t> splits;
  std::int64_t length_bytes = 0;
};

// What one period of a group's pages costs when no two pages lie next to each other.
struct Description {
  std::int64_t tokens = 0;  // covered by the figures below
  std::int64_t runs = 0;
  std::int64_t length_bytes = 0;
  std::int64_t longest_run = 0;
  std::int64_t shortest_run = 0;
};

struct Program;
struct Shape;
struct Walk;
class ProgramCache;

// Immutable after construction but for a locked, bounded cache of programs: any thread may call.
class Plan {
 public:
  // Throws std::invalid_argument for a plane that leaves its region or a bad value and
  // std::overflow_error where a sum leaves int64.
  Plan(std::vector<GroupSpec> groups, std::vector<PlanePair> pairs,
       std::vector<std::int64_t> source_region_bytes,
       std::vector<std::int64_t> destination_region_bytes, PlanLimits limits);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // The runs of a request. One batch per (group, layer) where every run belongs to one layer, else
  // batches of about `batch_bytes`; a run is not extended over another page beyond `run_bytes_max`.
  // `layers`: only these, sorted and unique; nullopt: all.
  // Throws std::invalid_argument (ids, ranges, tiles cut), std::overflow_error, LimitError.
  Batches batches(const std::vector<GroupRequest>& requests,
                  const std::optional<std::vector<std::int64_t>>& layers, std::int64_t batch_bytes,
                  std::int64_t run_bytes_max) const;

  // Bytes that `batches` must plan for requests that it took: from cells and ranges alone.
  std::int64_t expected_bytes(const std::vector<GroupRequest>& requests,
                              const std::optional<std::vector<std::int64_t>>& layers) const;

  // The same runs in outline, for whoever fills them in elsewhere. Ids are those of all requests
  // one after the other. Throws as batches.
  Outline outline(const std::vector<GroupRequest>& requests,
                  const std::optional<std::vector<std::int64_t>>& layers) const;

  // Figures of one period of `group`.
  Description describe(std::size_t group) const;

  // The number of a group; nullopt: this plan moves nothing of such a group.
  std::optional<std::size_t> find_group(std::string_view name) const;

 private:
  std::shared_ptr<const Program> program(const Shape& shape) const;
  // nullopt: nothing of this request moves.
  std::optional<Walk> walk(const GroupRequest& request,
                           const std::optional<std::vector<std::int64_t>>& layers) const;
  std::vector<std::int64_t> chosen_layers(
      std::size_t group, const std::optional<std::vector<std::int64_t>>& layers) const;

  // What one layer of a group weighs: one token's rows, and cells of a page that move whole.
  struct Weight {
    std::int64_t layer;
    std::int64_t row_bytes;
    std::int64_t page_bytes;
  };
  void weigh(const PlanePair& pair);

  std::vector<GroupSpec> groups_;
  std::vector<std::vector<PlanePair>> pairs_;      // by group
  std::vector<std::vector<std::int64_t>> layers_;  // by group, sorted and unique
  std::vector<std::vector<Weight>> weights_;       // by group, as layers_
  std::vector<Weight> totals_;                     // by group: of all its layers
  PlanLimits limits_;
  std::unique_ptr<ProgramCache> cache_;
};

}  // namespace pdx
