#include "pdx/plan.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>

namespace pdx {
namespace {

using i64 = std::int64_t;

i64 add(i64 a, i64 b) {
  i64 sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) throw std::overflow_error("a sum leaves 64 bits");
  return sum;
}

i64 multiply(i64 a, i64 b) {
  i64 product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw std::overflow_error("a product leaves 64 bits");
  }
  return product;
}

// A stretch of rows in one source page and one destination page.
struct Segment {
  i64 source_page;
  i64 destination_page;
  std::size_t program;
};

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

constexpr i64 kManyLayers = -1;

// Entries that touch on both sides for every page pair become one.
bool touches(const Entry& a, const Entry& b) {
  return a.source_offset + a.length == b.source_offset &&
         a.destination_offset + a.length == b.destination_offset &&
         a.source_region == b.source_region && a.destination_region == b.destination_region &&
         a.source_page_stride == b.source_page_stride &&
         a.destination_page_stride == b.destination_page_stride;
}

void check_side(const PlanePair& pair, const PlaneSide& side, const SideSpec& pages,
                const std::vector<i64>& region_bytes, const char* which) {
  const auto refuse = [&](const char* what) {
    throw std::invalid_argument(std::string(which) + " plane: " + what);
  };
  if (side.region < 0 || static_cast<std::size_t>(side.region) >= region_bytes.size()) {
    refuse("no such region");
  }
  if (side.base < 0 || side.page_stride < 0 || side.row_stride < 0 || side.head_stride < 0) {
    refuse("a negative offset or stride");
  }
  const i64 rows = pair.rows_kind == Rows::kToken ? pages.page_size : pair.rows;
  i64 end = add(side.base, multiply(pages.pages - 1, side.page_stride));
  end = add(end, multiply(rows - 1, side.row_stride));
  end = add(end, multiply(pair.heads - 1, side.head_stride));
  end = add(end, pair.cell_bytes);
  if (end > region_bytes[static_cast<std::size_t>(side.region)]) refuse("leaves its region");
}

void check_group(const GroupSpec& group) {
  for (const SideSpec& side : {group.source, group.destination}) {
    if (side.page_size < 1 || side.pages < 1 || side.reserved_pages < 0 ||
        side.reserved_pages > side.pages) {
      throw std::invalid_argument("group " + group.name + ": page_size, pages or reserved_pages");
    }
  }
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

}  // namespace

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

namespace {
// From here on memory is mapped in huge pages: the page faults of small ones would cost more than
// writing the runs.
constexpr std::size_t kMappedFromBytes = std::size_t{4} << 20;

std::size_t page_multiple(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}
}  // namespace

RunBuffer::RunBuffer(std::size_t capacity) {
  const std::size_t bytes = capacity * sizeof(Run);
  if (bytes < kMappedFromBytes) {
    data_ = static_cast<Run*>(std::malloc(std::max(bytes, sizeof(Run))));
    if (data_ == nullptr) throw std::bad_alloc();
    return;
  }
  const std::size_t length = page_multiple(bytes);
  void* mapped = mmap(nullptr, length, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  madvise(mapped, length, MADV_HUGEPAGE);  // advice only: where it is refused small pages serve
  data_ = static_cast<Run*>(mapped);
  mapped_bytes_ = length;
}

RunBuffer::~RunBuffer() {
  if (mapped_bytes_ == 0) {
    std::free(data_);
  } else {
    munmap(data_, mapped_bytes_);
  }
}

void RunBuffer::fit() {
  const std::size_t used = std::max(size_ * sizeof(Run), sizeof(Run));
  if (mapped_bytes_ == 0) {
    if (void* fitted = std::realloc(data_, used); fitted != nullptr) {
      data_ = static_cast<Run*>(fitted);
    }
    return;
  }
  const std::size_t kept = page_multiple(used);
  if (kept < mapped_bytes_) {
    munmap(reinterpret_cast<char*>(data_) + kept, mapped_bytes_ - kept);
    mapped_bytes_ = kept;
  }
}

Plan::Plan(std::vector<GroupSpec> groups, std::vector<PlanePair> pairs,
           std::vector<i64> source_region_bytes, std::vector<i64> destination_region_bytes,
           PlanLimits limits)
    : groups_(std::move(groups)),
      pairs_(groups_.size()),
      layers_(groups_.size()),
      limits_(limits),
      cache_(
          std::make_unique<ProgramCache>(static_cast<std::size_t>(limits.runs_per_page_max) * 2)) {
  for (const GroupSpec& group : groups_) check_group(group);
  for (const PlanePair& pair : pairs) {
    if (pair.group < 0 || static_cast<std::size_t>(pair.group) >= groups_.size()) {
      throw std::invalid_argument("a plane of no group");
    }
    if (pair.heads < 1 || pair.cell_bytes < 1 || pair.rows < 1) {
      throw std::invalid_argument("a plane without cells");
    }
    const GroupSpec& group = groups_[static_cast<std::size_t>(pair.group)];
    check_side(pair, pair.source, group.source, source_region_bytes, "source");
    check_side(pair, pair.destination, group.destination, destination_region_bytes, "destination");
    pairs_[static_cast<std::size_t>(pair.group)].push_back(pair);
    layers_[static_cast<std::size_t>(pair.group)].push_back(pair.layer);
  }
  for (std::vector<i64>& layers : layers_) {
    std::sort(layers.begin(), layers.end());
    layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  }
}

Plan::~Plan() = default;

namespace {

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

i64 checked_piece_count(const PlanePair& pair, i64 rows) {
  const Pieces pieces(pair, rows);
  return multiply(pieces.outer.count, pieces.inner.count);
}

}  // namespace

std::shared_ptr<const Program> Plan::build(const Shape& shape) const {
  auto program = std::make_shared<Program>();
  const GroupSpec& group = groups_[shape.group];
  i64 pieces = 0;
  for (const PlanePair& pair : pairs_[shape.group]) {
    if (!std::binary_search(shape.layers.begin(), shape.layers.end(), pair.layer)) continue;
    const Stretch stretch = stretch_of(pair, group, shape);
    pieces = add(pieces, checked_piece_count(pair, stretch.rows));
    if (pieces > limits_.runs_per_page_max) {
      throw LimitError("group " + group.name + ": one page is cut into more than " +
                       std::to_string(limits_.runs_per_page_max) + " runs");
    }
    append_pieces(pair, stretch, program->entries);
  }
  merge(program->entries);
  check_disjoint(program->entries, group.name);
  for (const Entry& entry : program->entries) {
    program->length_bytes = add(program->length_bytes, entry.length);
    program->layered = program->layered && entry.layer != kManyLayers;
  }
  if (program->layered) divide_by_layer(*program, shape.layers);
  return program;
}

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

}  // namespace

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

namespace {

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

// Appends the runs of segments; a run grows over the next segment where both sides touch.
class Emitter {
 public:
  // `out.runs` has room for min(runs_max, what all segments need when none touch).
  Emitter(Batches& out, i64 run_bytes_max, std::size_t runs_max)
      : out_(out), run_bytes_max_(run_bytes_max), runs_max_(runs_max) {}

  // Forgets open runs: the next ones belong to another batch.
  void close() { std::fill(open_.begin(), open_.end(), Open{}); }

  void emit(const Segment& segment, const Entry* entries, std::size_t count, i64 length_bytes) {
    if (open_.size() < count) open_.resize(count);
    out_.length_bytes = add(out_.length_bytes, length_bytes);
    const std::size_t size = out_.runs.size();
    if (count > runs_max_ - size) {
      append<true>(segment, entries, count);
    } else {
      append<false>(segment, entries, count);
    }
  }

 private:
  // Where the newest run of an entry ends.
  struct Open {
    i64 source_end = -1;
    i64 destination_end = -1;
    Run* run = nullptr;
  };

  template <bool kNearLimit>
  void append(const Segment& segment, const Entry* entries, std::size_t count) {
    Run* const begin = out_.runs.data();
    Run* next = begin + out_.runs.size();
    for (std::size_t index = 0; index < count; ++index) {
      const Entry& entry = entries[index];
      Open& open = open_[index];
      const i64 source = entry.source_offset + segment.source_page * entry.source_page_stride;
      const i64 destination =
          entry.destination_offset + segment.destination_page * entry.destination_page_stride;
      if (open.source_end == source && open.destination_end == destination &&
          open.run->source_region == entry.source_region &&
          open.run->destination_region == entry.destination_region &&
          entry.length <= run_bytes_max_ - open.run->length) {
        open.run->length += entry.length;
        open.source_end += entry.length;
        open.destination_end += entry.length;
        continue;
      }
      if (kNearLimit && static_cast<std::size_t>(next - begin) == runs_max_) {
        throw LimitError("the request is cut into more than " + std::to_string(runs_max_) +
                         " runs; send it in smaller chunks");
      }
      open = {source + entry.length, destination + entry.length, next};
      *next++ = {entry.source_region, source, entry.destination_region, destination, entry.length};
    }
    out_.runs.set_size(static_cast<std::size_t>(next - begin));
  }

  Batches& out_;
  const i64 run_bytes_max_;
  const std::size_t runs_max_;
  std::vector<Open> open_;
};

void end_batch(Batches& out) {
  const auto end = static_cast<i64>(out.runs.size());
  if (out.splits.back() != end) out.splits.push_back(end);
}

// One batch a layer, layer after layer.
void emit_layers(const Walk& walk, Emitter& emitter, Batches& out) {
  for (std::size_t layer = 0; layer < walk.layers; ++layer) {
    emitter.close();
    for (const Segment& segment : walk.segments) {
      const Program& program = *walk.programs[segment.program];
      const std::size_t begin = program.class_begin[layer];
      emitter.emit(segment, program.entries.data() + begin, program.class_begin[layer + 1] - begin,
                   program.class_bytes[layer]);
    }
    end_batch(out);
  }
}

// Page after page, a batch ending when it holds enough bytes.
void emit_pages(const Walk& walk, i64 batch_bytes, Emitter& emitter, Batches& out) {
  i64 batch_begin = out.length_bytes;
  emitter.close();
  for (const Segment& segment : walk.segments) {
    const Program& program = *walk.programs[segment.program];
    emitter.emit(segment, program.entries.data(), program.entries.size(), program.length_bytes);
    if (out.length_bytes - batch_begin >= batch_bytes) {
      end_batch(out);
      emitter.close();
      batch_begin = out.length_bytes;
    }
  }
  end_batch(out);
}

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

std::shared_ptr<const Program> Plan::program(const Shape& shape) const {
  if (auto found = cache_->find(shape)) return found;
  auto built = build(shape);
  cache_->insert(shape, built);
  return built;
}

std::vector<i64> Plan::chosen_layers(std::size_t group,
                                     const std::optional<std::vector<i64>>& layers) const {
  if (!layers.has_value()) return layers_[group];
  std::vector<i64> chosen;
  std::set_intersection(layers->begin(), layers->end(), layers_[group].begin(),
                        layers_[group].end(), std::back_inserter(chosen));
  return chosen;
}

Walk Plan::walk(const GroupRequest& request, std::vector<i64> layers) const {
  const GroupSpec& group = groups_[request.group];
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
      walk.programs.push_back(program(shape));
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

Batches Plan::batches(const std::vector<GroupRequest>& requests,
                      const std::optional<std::vector<i64>>& layers, i64 batch_bytes,
                      i64 run_bytes_max) const {
  const auto runs_max = static_cast<std::size_t>(limits_.runs_max);
  std::vector<Walk> walks;
  std::size_t bound = 0;
  for (const GroupRequest& request : requests) {
    if (request.group >= groups_.size()) throw std::invalid_argument("no such group");
    check_range(groups_[request.group], request);
    std::vector<i64> chosen = chosen_layers(request.group, layers);
    if (request.first == request.end || chosen.empty()) continue;
    walks.push_back(walk(request, std::move(chosen)));
    bound = std::min(runs_max, bound + walks.back().runs_bound(runs_max));
  }
  Batches out;
  out.runs = RunBuffer(bound);
  out.splits.push_back(0);
  Emitter emitter(out, run_bytes_max, runs_max);
  for (const Walk& walk : walks) {
    if (walk.layered) {
      emit_layers(walk, emitter, out);
    } else {
      emit_pages(walk, batch_bytes, emitter, out);
    }
  }
  out.runs.fit();
  return out;
}

Description Plan::describe(std::size_t group_index) const {
  constexpr i64 kSegmentsMax = 4096;  // of one period: page sizes without a common divisor
  Description figures;
  if (group_index >= groups_.size()) throw std::invalid_argument("no such group");
  const GroupSpec& group = groups_[group_index];
  Shape shape{group_index, 0, 0, 0, layers_[group_index]};
  if (shape.layers.empty()) return figures;
  for (i64 segment = 0; segment < kSegmentsMax; ++segment) {
    shape.rows = std::min(group.source.page_size - shape.source_row,
                          group.destination.page_size - shape.destination_row);
    const auto found = program(shape);
    figures.tokens = add(figures.tokens, shape.rows);
    figures.runs += static_cast<i64>(found->entries.size());
    figures.length_bytes = add(figures.length_bytes, found->length_bytes);
    for (const Entry& entry : found->entries) {
      figures.longest_run = std::max(figures.longest_run, entry.length);
      figures.shortest_run =
          figures.shortest_run == 0 ? entry.length : std::min(figures.shortest_run, entry.length);
    }
    shape.source_row = (shape.source_row + shape.rows) % group.source.page_size;
    shape.destination_row = (shape.destination_row + shape.rows) % group.destination.page_size;
    if (shape.source_row == 0 && shape.destination_row == 0) break;
  }
  return figures;
}

i64 first_bad_id(const i64* ids, std::size_t count, i64 reserved_pages, i64 pages) {
  for (std::size_t at = 0; at < count; ++at) {
    if (ids[at] < reserved_pages || ids[at] >= pages) return static_cast<i64>(at);
  }
  return -1;
}

i64 first_repeated_id(const i64* ids, std::size_t count, i64 pages) {
  if (count < 2) return -1;
  // A bitmap of the pool where it is small beside the list, else a sorted copy.
  const auto words = static_cast<std::size_t>(pages / 64 + 1);
  if (words <= 4 * count + 4096) {
    std::vector<std::uint64_t> seen(words, 0);
    for (std::size_t at = 0; at < count; ++at) {
      const auto id = static_cast<std::size_t>(ids[at]);
      const std::uint64_t bit = std::uint64_t{1} << (id % 64);
      if ((seen[id / 64] & bit) != 0) return static_cast<i64>(at);
      seen[id / 64] |= bit;
    }
    return -1;
  }
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tie(ids[a], a) < std::tie(ids[b], b);
  });
  std::size_t first = count;
  for (std::size_t at = 1; at < count; ++at) {
    if (ids[order[at]] == ids[order[at - 1]]) first = std::min(first, order[at]);
  }
  return first == count ? -1 : static_cast<i64>(first);
}

}  // namespace pdx
