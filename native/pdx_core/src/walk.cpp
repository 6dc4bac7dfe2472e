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

// Tokens of a request as page positions and rows on one side.
struct Cursor {
  const PageList& pages;
  const SideSpec& side;
  std::size_t position;
  i64 row;

  Cursor(const PageList& list, const SideSpec& spec, i64 token, i64 end, const std::string& name)
      : pages(list), side(spec), position(0), row(0) {
    if (list.first_token < 0 || token < list.first_token) {
      throw std::invalid_argument(name + ": pages begin at token " +
                                  std::to_string(list.first_token) + ", the range at token " +
                                  std::to_string(token));
    }
    const i64 needed = (end - list.first_token - 1) / spec.page_size + 1;
    if (static_cast<std::uint64_t>(needed) > list.count) {
      throw std::invalid_argument(
          name + ": " + std::to_string(list.count) + " pages of " + std::to_string(spec.page_size) +
          " tokens from token " + std::to_string(list.first_token) + " do not reach token " +
          std::to_string(end) + "; " + std::to_string(needed) + " are needed");
    }
    position = static_cast<std::size_t>((token - list.first_token) / spec.page_size);
    row = (token - list.first_token) % spec.page_size;
  }

  i64 left() const { return side.page_size - row; }

  i64 page(const std::string& name) const {
    const i64 id = pages.ids[position];
    if (id < side.reserved_pages || id >= side.pages) {
      throw std::invalid_argument(name + ": page id " + std::to_string(id) + " at position " +
                                  std::to_string(position) + " is outside [" +
                                  std::to_string(side.reserved_pages) + ", " +
                                  std::to_string(side.pages) + ")");
    }
    return id;
  }

  void advance(i64 rows) {
    row += rows;
    if (row == side.page_size) {
      row = 0;
      ++position;
    }
  }
};

// The end of a range, at a page end where pages on both sides cover the same tokens.
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

void check_range(const GroupSpec& group, const GroupRequest& request) {
  if (request.first < 0 || request.first > request.end || request.source.first_token < 0 ||
      request.destination.first_token < 0) {
    throw std::invalid_argument("group " + group.name + ": token range [" +
                                std::to_string(request.first) + ", " + std::to_string(request.end) +
                                ")");
  }
}

// Segments of a request: one a page where pages of both sides cover the same tokens.
std::size_t segments_bound(const GroupSpec& group, const GroupRequest& request, i64 end) {
  const i64 tokens = end - request.first;
  i64 bound = tokens / group.source.page_size + 2;
  if (end == request.end || group.source.page_size != group.destination.page_size) {
    bound += tokens / group.destination.page_size + 2;
  }
  return static_cast<std::size_t>(bound);
}

// Finds the program of a segment. Shapes follow each other in a short cycle, so the one that came
// next the last time is tried first.
class ShapeIndex {
 public:
  template <typename Make>
  std::size_t find(i64 source_row, i64 destination_row, i64 rows, Make make) {
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

// A destination page written twice would hold the bytes of one of its two source pages only.
void check_written_once(const GroupRequest& request, std::size_t begin, std::size_t end, i64 pages,
                        const std::string& name) {
  const i64 found = first_repeated_id(request.destination.ids + begin, end - begin, pages);
  if (found >= 0) {
    const std::size_t at = begin + static_cast<std::size_t>(found);
    throw std::invalid_argument(name + ": page id " + std::to_string(request.destination.ids[at]) +
                                " at position " + std::to_string(at) +
                                " appeared before; each page may be written once");
  }
}

}  // namespace

Walk walk_request(const GroupSpec& group, const GroupRequest& request, std::vector<i64> layers,
                  const ProgramOf& program_of) {
  check_range(group, request);
  const std::string source_name = "source pages of group " + group.name;
  const std::string destination_name = "destination pages of group " + group.name;
  const i64 end = rounded_end(group, request);
  Cursor source(request.source, group.source, request.first, end, source_name);
  Cursor destination(request.destination, group.destination, request.first, end, destination_name);
  const std::size_t first_written = destination.position;
  Walk walk;
  walk.layers = layers.size();
  walk.segments.reserve(segments_bound(group, request, end));
  Shape shape{request.group, 0, 0, 0, std::move(layers)};
  ShapeIndex shapes;
  for (i64 token = request.first; token < end;) {
    const i64 rows = std::min({source.left(), destination.left(), end - token});
    const std::size_t index = shapes.find(source.row, destination.row, rows, [&] {
      shape.source_row = source.row;
      shape.destination_row = destination.row;
      shape.rows = rows;
      walk.programs.push_back(program_of(shape));
      walk.layered = walk.layered && walk.programs.back()->layered;
    });
    walk.segments.push_back({source.page(source_name), destination.page(destination_name), index});
    source.advance(rows);
    destination.advance(rows);
    token += rows;
  }
  check_written_once(request, first_written, destination.position + (destination.row > 0 ? 1 : 0),
                     group.destination.pages, destination_name);
  return walk;
}

}  // namespace pdx
