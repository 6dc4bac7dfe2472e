// A request as spans of segments: rows that lie in one source page and in one destination page.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "pdx/plan.h"
#include "program.h"

namespace pdx {

// Pages that follow each other in the lists of both sides and move by one program.
struct Span {
  const i64* source_ids;
  const i64* destination_ids;
  std::size_t count;
  std::size_t program;
};

// A request walked: its spans, and the program of each distinct shape.
struct Walk {
  std::vector<Span> spans;
  std::vector<std::shared_ptr<const Program>> programs;
  std::size_t layers = 0;
  bool layered = true;

  // Runs when no two pages touch, at most `most`.
  std::size_t runs_bound(std::size_t most) const;
};

// Refuses a range that is none and ids outside the pool, those beyond the range too. Throws
// std::invalid_argument.
void check_request(const GroupSpec& group, const GroupRequest& request);

// The end of a checked request's range, at a page end where pages on both sides cover the same
// tokens. Throws std::overflow_error.
i64 rounded_end(const GroupSpec& group, const GroupRequest& request);

using ProgramOf = std::function<std::shared_ptr<const Program>(const Shape&)>;

// Walks tokens [first, end) of a checked request whose range is not empty; `layers` are those of
// the group that move. Throws std::invalid_argument: ids repeated at the destination, page lists
// that do not reach; LimitError: programs of more than `entries_max` entries together.
Walk walk_request(const GroupSpec& group, const GroupRequest& request, std::vector<i64> layers,
                  const ProgramOf& program_of, std::size_t entries_max);

}  // namespace pdx
