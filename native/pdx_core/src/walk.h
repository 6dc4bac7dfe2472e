// A request as segments: rows that lie in one source page and in one destination page.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "pdx/plan.h"
#include "program.h"

namespace pdx {

// A stretch of rows in one source page and one destination page.
struct Segment {
  i64 source_page;
  i64 destination_page;
  std::size_t program;
};

// A request walked: its segments, and the program of each distinct shape.
struct Walk {
  std::vector<Segment> segments;
  std::vector<std::shared_ptr<const Program>> programs;
  std::size_t layers = 0;
  bool layered = true;

  // Runs when no two segments touch, at most `most`.
  std::size_t runs_bound(std::size_t most) const {
    std::vector<std::size_t> entries;
    for (const auto& program : programs) entries.push_back(program->entries.size());
    std::size_t bound = 0;
    for (const Segment& segment : segments) {
      bound += entries[segment.program];
      if (bound > most) return most;
    }
    return bound;
  }
};

using ProgramOf = std::function<std::shared_ptr<const Program>(const Shape&)>;

// Walks tokens [first, end) of a request whose range is not empty; `layers` are those of the group
// that move. Throws std::invalid_argument: ids outside the pool or repeated at the destination,
// page lists that do not reach.
Walk walk_request(const GroupSpec& group, const GroupRequest& request, std::vector<i64> layers,
                  const ProgramOf& program_of);

}  // namespace pdx
