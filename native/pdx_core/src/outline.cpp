#include "pdx/outline.h"

#include <string>

#include "pdx/plan.h"
#include "program.h"
#include "walk.h"

namespace pdx {
namespace {

// Entries [first, first + count) of the outline that are emitted together.
struct Slice {
  i64 first;
  i64 count;
  i64 length_bytes;
};

Slice append_entries(Outline& out, const Entry* entries, std::size_t count) {
  Slice slice{static_cast<i64>(out.entries.size()), static_cast<i64>(count), 0};
  for (std::size_t at = 0; at < count; ++at) {
    const Entry& entry = entries[at];
    out.entries.push_back({entry.source_offset, entry.destination_offset, entry.length,
                           entry.source_page_stride, entry.destination_page_stride,
                           entry.source_region, entry.destination_region, slice.length_bytes});
    slice.length_bytes = add(slice.length_bytes, entry.length);
  }
  return slice;
}

// Appends one request; positions of ids count from those of earlier requests on.
class Drawer {
 public:
  Drawer(Outline& out, const GroupSpec& group, const GroupRequest& request, i64 source_ids_before,
         i64 destination_ids_before, i64 rows_max)
      : out_(out),
        group_(group),
        request_(request),
        source_ids_before_(source_ids_before),
        destination_ids_before_(destination_ids_before),
        rows_max_(rows_max) {}

  void draw(const Walk& walk) {
    if (!walk.layered) {
      draw_class(walk, [](const Program& program) {
        return std::pair(std::size_t{0}, program.entries.size());
      });
      return;
    }
    for (std::size_t layer = 0; layer < walk.layers; ++layer) {
      draw_class(walk, [layer](const Program& program) {
        return std::pair(program.class_begin[layer], program.class_begin[layer + 1]);
      });
    }
  }

 private:
  // The entries that `range_of` names of each program, over all spans.
  template <typename RangeOf>
  void draw_class(const Walk& walk, const RangeOf& range_of) {
    std::vector<Slice> slices;
    for (const auto& program : walk.programs) {
      const auto [begin, end] = range_of(*program);
      slices.push_back(append_entries(out_, program->entries.data() + begin, end - begin));
    }
    for (const Span& span : walk.spans) append_span(span, slices[span.program]);
  }

  void append_span(const Span& span, const Slice& slice) {
    if (slice.count == 0) return;
    const auto pages = static_cast<i64>(span.count);
    out_.spans.push_back(
        {out_.rows, out_.length_bytes, source_ids_before_ + (span.source_ids - request_.source.ids),
         destination_ids_before_ + (span.destination_ids - request_.destination.ids), pages,
         slice.first, slice.count, slice.length_bytes, group_.source.reserved_pages,
         group_.source.pages, group_.destination.reserved_pages, group_.destination.pages});
    out_.rows = add(out_.rows, multiply(pages, slice.count));
    out_.length_bytes = add(out_.length_bytes, multiply(pages, slice.length_bytes));
    if (out_.rows > rows_max_) {
      throw LimitError("the request is cut into more than " + std::to_string(rows_max_) +
                       " runs; send it in smaller chunks");
    }
  }

  Outline& out_;
  const GroupSpec& group_;
  const GroupRequest& request_;
  const i64 source_ids_before_;
  const i64 destination_ids_before_;
  const i64 rows_max_;
};

}  // namespace

Outline Plan::outline(const std::vector<GroupRequest>& requests,
                      const std::optional<std::vector<i64>>& layers) const {
  Outline out;
  i64 source_ids = 0;
  i64 destination_ids = 0;
  for (const GroupRequest& request : requests) {
    if (const std::optional<Walk> walked = walk(request, layers)) {
      Drawer(out, groups_[request.group], request, source_ids, destination_ids, limits_.runs_max)
          .draw(*walked);
    }
    source_ids = add(source_ids, static_cast<i64>(request.source.count));
    destination_ids = add(destination_ids, static_cast<i64>(request.destination.count));
  }
  return out;
}

}  // namespace pdx
