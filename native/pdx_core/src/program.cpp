#include "program.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pdx {
namespace {

constexpr i64 kManyLayers = -1;

// Entries that touch on both sides for every page pair become one.
bool touches(const Entry& a, const Entry& b) {
  return a.source_offset + a.length == b.source_offset &&
         a.destination_offset + a.length == b.destination_offset &&
         a.source_region == b.source_region && a.destination_region == b.destination_region &&
         a.source_page_stride == b.source_page_stride &&
         a.destination_page_stride == b.destination_page_stride;
}

// An axis of a plane pair that is not contiguous on both sides.
struct Axis {
  i64 count;
  i64 source_stride;
  i64 destination_stride;
};

// The fewest contiguous pieces of a plane pair in a segment.
struct Pieces {
  i64 length;
  Axis outer{1, 0, 0};
  Axis inner{1, 0, 0};

  Pieces(const PlanePair& pair, i64 rows) : length(pair.cell_bytes) {
    Axis axes[2] = {{rows, pair.source.row_stride, pair.destination.row_stride},
                    {pair.heads, pair.source.head_stride, pair.destination.head_stride}};
    for (int turn = 0; turn < 2; ++turn) {
      for (Axis& axis : axes) {
        if (axis.count > 1 && axis.source_stride == length && axis.destination_stride == length) {
          length = multiply(length, axis.count);
          axis.count = 1;
        }
      }
    }
    outer = axes[0];
    inner = axes[1];
  }
};

// Rows of a page that a segment moves of this pair, and where they begin.
struct Stretch {
  i64 source_row;
  i64 destination_row;
  i64 rows;
};

Stretch stretch_of(const PlanePair& pair, const GroupSpec& group, const Shape& shape) {
  if (pair.rows_kind == Rows::kToken) return {shape.source_row, shape.destination_row, shape.rows};
  if (shape.source_row != 0 || shape.destination_row != 0 || shape.rows != group.source.page_size ||
      shape.rows != group.destination.page_size) {
    throw std::invalid_argument("group " + group.name +
                                ": the token range begins or ends inside a page whose cells only "
                                "move whole (tile); use page aligned ranges and equal page sizes");
  }
  return {0, 0, pair.rows};
}

void append_pieces(const PlanePair& pair, const Stretch& stretch, std::vector<Entry>& entries) {
  const Pieces pieces(pair, stretch.rows);
  Entry entry{
      .source_offset = pair.source.base + stretch.source_row * pair.source.row_stride,
      .destination_offset =
          pair.destination.base + stretch.destination_row * pair.destination.row_stride,
      .length = pieces.length,
      .source_page_stride = pair.source.page_stride,
      .destination_page_stride = pair.destination.page_stride,
      .source_region = pair.source.region,
      .destination_region = pair.destination.region,
      .layer = pair.layer,
  };
  const Entry first = entry;
  for (i64 outer = 0; outer < pieces.outer.count; ++outer) {
    for (i64 inner = 0; inner < pieces.inner.count; ++inner) {
      entry.source_offset = first.source_offset + outer * pieces.outer.source_stride +
                            inner * pieces.inner.source_stride;
      entry.destination_offset = first.destination_offset +
                                 outer * pieces.outer.destination_stride +
                                 inner * pieces.inner.destination_stride;
      entries.push_back(entry);
    }
  }
}

// Merges what touches on both sides; sorted by source afterwards.
void merge(std::vector<Entry>& entries) {
  const auto by_source = [](const Entry& a, const Entry& b) {
    return std::tie(a.source_region, a.source_offset) < std::tie(b.source_region, b.source_offset);
  };
  if (!std::is_sorted(entries.begin(), entries.end(), by_source)) {
    std::sort(entries.begin(), entries.end(), by_source);
  }
  std::size_t kept = 0;
  for (std::size_t next = 1; next < entries.size(); ++next) {
    Entry& last = entries[kept];
    if (touches(last, entries[next])) {
      last.length += entries[next].length;
      if (last.layer != entries[next].layer) last.layer = kManyLayers;
    } else {
      entries[++kept] = entries[next];
    }
  }
  if (!entries.empty()) entries.resize(kept + 1);
}

// Two cells of a page at the same destination bytes: the layout is not sound.
void check_disjoint(const std::vector<Entry>& entries, const std::string& group) {
  std::vector<const Entry*> order(entries.size());
  std::transform(entries.begin(), entries.end(), order.begin(), [](const Entry& e) { return &e; });
  std::sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) {
    return std::tie(a->destination_region, a->destination_offset) <
           std::tie(b->destination_region, b->destination_offset);
  });
  for (std::size_t at = 1; at < order.size(); ++at) {
    const Entry& before = *order[at - 1];
    const Entry& after = *order[at];
    if (before.destination_region == after.destination_region &&
        before.destination_offset + before.length > after.destination_offset) {
      throw std::invalid_argument("group " + group + ": two planes of the destination share byte " +
                                  std::to_string(after.destination_offset) + " of a page");
    }
  }
}

// Puts the entries of each layer together and notes where they begin.
void divide_by_layer(Program& program, const std::vector<i64>& layers) {
  std::stable_sort(program.entries.begin(), program.entries.end(),
                   [](const Entry& a, const Entry& b) { return a.layer < b.layer; });
  program.class_begin.reserve(layers.size() + 1);
  std::size_t at = 0;
  for (const i64 layer : layers) {
    program.class_begin.push_back(at);
    i64 bytes = 0;
    for (; at < program.entries.size() && program.entries[at].layer == layer; ++at) {
      bytes += program.entries[at].length;
    }
    program.class_bytes.push_back(bytes);
  }
  program.class_begin.push_back(at);
}

i64 piece_count(const PlanePair& pair, i64 rows) {
  const Pieces pieces(pair, rows);
  return multiply(pieces.outer.count, pieces.inner.count);
}

}  // namespace

Program build_program(const GroupSpec& group, const std::vector<PlanePair>& pairs,
                      const Shape& shape, i64 runs_max) {
  Program program;
  i64 pieces = 0;
  for (const PlanePair& pair : pairs) {
    if (!std::binary_search(shape.layers.begin(), shape.layers.end(), pair.layer)) continue;
    const Stretch stretch = stretch_of(pair, group, shape);
    pieces = add(pieces, piece_count(pair, stretch.rows));
    if (pieces > runs_max) {
      throw LimitError("group " + group.name + ": one page is cut into more than " +
                       std::to_string(runs_max) + " runs");
    }
    append_pieces(pair, stretch, program.entries);
  }
  merge(program.entries);
  check_disjoint(program.entries, group.name);
  for (const Entry& entry : program.entries) {
    program.length_bytes = add(program.length_bytes, entry.length);
    program.layered = program.layered && entry.layer != kManyLayers;
  }
  if (program.layered) divide_by_layer(program, shape.layers);
  return program;
}

}  // namespace pdx
