// Programs: the merged runs of one segment shape, relative to the pages' bases.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "checked.h"
#include "pdx/plan.h"

namespace pdx {

// One run of a program, relative to page 0 on both sides.
struct Entry {
  i64 source_offset;
  i64 destination_offset;
  i64 length;
  i64 source_page_stride;
  i64 destination_page_stride;
  i64 source_region;
  i64 destination_region;
  i64 layer;
};

// What decides how a segment is cut.
struct Shape {
  std::size_t group;
  i64 source_row;
  i64 destination_row;
  i64 rows;
  std::vector<i64> layers;  // of this group, sorted

  bool operator<(const Shape& other) const {
    return std::tie(group, source_row, destination_row, rows, layers) <
           std::tie(other.group, other.source_row, other.destination_row, other.rows, other.layers);
  }
};

// The runs of one shape.
struct Program {
  std::vector<Entry> entries;            // layered: by layer; both: then by source offset
  std::vector<std::size_t> class_begin;  // layered: entries of layer l are [l], [l + 1]
  std::vector<i64> class_bytes;
  i64 length_bytes = 0;
  bool layered = true;  // every entry belongs to one layer
};

// Programs by shape, bounded by the entries they hold. Emptied when full: shapes are few.
class ProgramCache {
 public:
  explicit ProgramCache(std::size_t entries_max) : entries_max_(entries_max) {}

  std::shared_ptr<const Program> find(const Shape& shape) {
    const std::lock_guard lock(mutex_);
    const auto found = programs_.find(shape);
    return found == programs_.end() ? nullptr : found->second;
  }

  void insert(const Shape& shape, const std::shared_ptr<const Program>& program) {
    // An entry of a tiny program still costs a key with its layers.
    const std::size_t cost = program->entries.size() + shape.layers.size() + 1;
    const std::lock_guard lock(mutex_);
    if (entries_ + cost > entries_max_) {
      programs_.clear();
      entries_ = 0;
    }
    if (cost <= entries_max_ && programs_.emplace(shape, program).second) entries_ += cost;
  }

 private:
  std::mutex mutex_;
  std::map<Shape, std::shared_ptr<const Program>> programs_;
  std::size_t entries_ = 0;
  const std::size_t entries_max_;
};

// The program of a shape. Throws std::invalid_argument where a tile would be cut or two planes of
// the destination share bytes, LimitError beyond `runs_max` pieces.
Program build_program(const GroupSpec& group, const std::vector<PlanePair>& pairs,
                      const Shape& shape, i64 runs_max);

}  // namespace pdx
