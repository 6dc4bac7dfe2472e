#include "walk.h"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include "pdx/page_ids.h"

namespace pdx {
namespace {

// Which pages an error is about; put into words only there.
struct PagesName {
  const char* side;
  const GroupSpec& group;

  std::string operator()() const { return std::string(side) + " pages of group " + group.name; }
};

PagesName source_pages(const GroupSpec& group) { return {"source", group}; }
PagesName destination_pages(const GroupSpec& group) { return {"destination", group}; }

// Tokens of a request as page positions and rows on one side.
struct Cursor {
  const PageList& pages;
  const SideSpec& side;
  std::size_t position;
  i64 row;

  Cursor(const PageList& list, const SideSpec& spec, i64 token, i64 end, const PagesName& name)
      : pages(list), side(spec), position(0), row(0) {
    if (list.first_token < 0 || token < list.first_token) {
      throw std::invalid_argument(name() + ": pages begin at token " +
                                  std::to_string(list.first_token) + ", the range at token " +
                                  std::to_string(token));
    }
    const i64 needed = (end - list.first_token - 1) / spec.page_size + 1;
    if (static_cast<std::uint64_t>(needed) > list.count) {
      throw std::invalid_argument(name() + ": " + std::to_string(list.count) + " pages of " +
                                  std::to_string(spec.page_size) + " tokens from token " +
                                  std::to_string(list.first_token) + " do not reach token " +
                                  std::to_string(end) + "; " + std::to_string(needed) +
                                  " are needed");
    }
    position = static_cast<std::size_t>((token - list.first_token) / spec.page_size);
    row = (token - list.first_token) % spec.page_size;
  }

  i64 left() const { return side.page_size - row; }
  const i64* id() const { return pages.ids + position; }

  void advance(i64 rows) {
    row += rows;
    if (row == side.page_size) {
      row = 0;
      ++position;
    }
  }
};

void check_range(const GroupSpec& group, const GroupRequest& request) {
  if (request.first < 0 || request.first > request.end || request.source.first_token < 0 ||
      request.destination.first_token < 0) {
    throw std::invalid_argument("group " + group.name + ": token range [" +
                                std::to_string(request.first) + ", " + std::to_string(request.end) +
                                ")");
  }
}

// Finds the program of a segment. Shapes follow each other in a short cycle, so the one that came
// next the last time is tried first.
class ShapeIndex {
 public:
  template <typename Make>
  std::size_t find(i64 source_row, i64 destination_row, i64 rows, const Make& make) {
    const auto is = [&](std::size_t at) {
      return keys_[at].source_row == source_row && keys_[at].destination_row == destination_row &&
             keys_[at].rows == rows;
    };
    if (last_ < keys_.size() && keys_[last_].next < keys_.size() && is(keys_[last_].next)) {
      last_ = keys_[last_].next;
      return last_;
    }
    const auto [found, added] =
        places_.try_emplace(std::tuple(source_row, destination_row, rows), keys_.size());
    if (added) {
      make();
      keys_.push_back({source_row, destination_row, rows, keys_.size()});
    }
    if (last_ < keys_.size()) keys_[last_].next = found->second;
    last_ = found->second;
    return last_;
  }

 private:
  struct Key {
    i64 source_row;
    i64 destination_row;
    i64 rows;
    std::size_t next;
  };
  std::vector<Key> keys_;
  std::map<std::tuple<i64, i64, i64>, std::size_t> places_;
  std::size_t last_ = std::numeric_limits<std::size_t>::max();
};

// All ids of a list, those beyond the range too.
void check_ids(const PageList& list, const SideSpec& side, const PagesName& name) {
  const i64 found = first_bad_id(list.ids, list.count, side.reserved_pages, side.pages);
  if (found < 0) return;
  const auto at = static_cast<std::size_t>(found);
  throw std::invalid_argument(name() + ": page id " + std::to_string(list.ids[at]) +
                              " at position " + std::to_string(at) + " is outside [" +
                              std::to_string(side.reserved_pages) + ", " +
                              std::to_string(side.pages) + ")");
}

// A destination page written twice would hold the bytes of one of its two source pages only.
void check_written_once(const PageList& list, const SideSpec& side, std::size_t begin,
                        std::size_t end, const PagesName& name) {
  const i64 found = first_repeated_id(list.ids + begin, end - begin, side.pages);
  if (found < 0) return;
  const std::size_t at = begin + static_cast<std::size_t>(found);
  throw std::invalid_argument(name() + ": page id " + std::to_string(list.ids[at]) +
                              " at position " + std::to_string(at) +
                              " appeared before; each page may be written "
                              "once");
}

// Whole pages from both cursors on that move alike: all of them where pages hold the same tokens.
std::size_t alike(const Cursor& source, const Cursor& destination, i64 left) {
  const i64 size = source.side.page_size;
  const bool whole = source.row == 0 && destination.row == 0 && destination.side.page_size == size;
  return whole && left >= size ? static_cast<std::size_t>(left / size) : 1;
}

}  // namespace

void check_request(const GroupSpec& group, const GroupRequest& request) {
  check_range(group, request);
  check_ids(request.source, group.source, source_pages(group));
  check_ids(request.destination, group.destination, destination_pages(group));
}

i64 rounded_end(const GroupSpec& group, const GroupRequest& request) {
  const i64 size = group.source.page_size;
  const i64 first = request.source.first_token;
  if (size != group.destination.page_size ||
      (first - request.destination.first_token) % size != 0) {
    return request.end;
  }
  const i64 past = (request.end - first) % size;
  return past <= 0 ? request.end : add(request.end, size - past);
}

std::size_t Walk::runs_bound(std::size_t most) const {
  std::size_t bound = 0;
  for (const Span& span : spans) {
    const std::size_t entries = programs[span.program]->entries.size();
    if (span.count > (most - bound) / std::max<std::size_t>(entries, 1)) return most;
    bound += span.count * entries;
  }
  return bound;
}

Walk walk_request(const GroupSpec& group, const GroupRequest& request, std::vector<i64> layers,
                  const ProgramOf& program_of, std::size_t entries_max) {
  const PagesName source_name = source_pages(group);
  const PagesName destination_name = destination_pages(group);
  const i64 end = rounded_end(group, request);
  Cursor source(request.source, group.source, request.first, end, source_name);
  Cursor destination(request.destination, group.destination, request.first, end, destination_name);
  const std::size_t first_written = destination.position;

  Walk walk;
  walk.layers = layers.size();
  Shape shape{request.group, 0, 0, 0, std::move(layers)};
  ShapeIndex shapes;
  std::size_t entries = 0;
  for (i64 token = request.first; token < end;) {
    const i64 rows = std::min({source.left(), destination.left(), end - token});
    const std::size_t index = shapes.find(source.row, destination.row, rows, [&] {
      shape.source_row = source.row;
      shape.destination_row = destination.row;
      shape.rows = rows;
      walk.programs.push_back(program_of(shape));
      walk.layered = walk.layered && walk.programs.back()->layered;
      entries += walk.programs.back()->entries.size();
      if (entries > entries_max) {
        throw LimitError(
            "group " + group.name + ": page sizes " + std::to_string(group.source.page_size) +
            " and " + std::to_string(group.destination.page_size) + " cut pages in too many ways");
      }
    });
    const std::size_t count = alike(source, destination, end - token);
    walk.spans.push_back({source.id(), destination.id(), count, index});
    source.position += count - 1;
    destination.position += count - 1;
    source.advance(rows);
    destination.advance(rows);
    token += rows * static_cast<i64>(count);
  }
  const std::size_t last_written = destination.position + (destination.row > 0 ? 1 : 0);
  check_written_once(request.destination, group.destination, first_written, last_written,
                     destination_name);
  return walk;
}

}  // namespace pdx
