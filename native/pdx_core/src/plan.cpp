#include "pdx/plan.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "program.h"
#include "walk.h"

namespace pdx {
namespace {

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

}  // namespace

Plan::Plan(std::vector<GroupSpec> groups, std::vector<PlanePair> pairs,
           std::vector<i64> source_region_bytes, std::vector<i64> destination_region_bytes,
           PlanLimits limits)
    : groups_(std::move(groups)),
      pairs_(groups_.size()),
      layers_(groups_.size()),
      weights_(groups_.size()),
      totals_(groups_.size()),
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
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    for (const i64 layer : layers_[group]) weights_[group].push_back({layer, 0, 0});
    for (const PlanePair& pair : pairs_[group]) weigh(pair);
  }
}

void Plan::weigh(const PlanePair& pair) {
  const auto group = static_cast<std::size_t>(pair.group);
  const auto layer = std::lower_bound(layers_[group].begin(), layers_[group].end(), pair.layer);
  const i64 cells = multiply(pair.heads, pair.cell_bytes);
  for (Weight* weight : {&weights_[group][static_cast<std::size_t>(layer - layers_[group].begin())],
                         &totals_[group]}) {
    if (pair.rows_kind == Rows::kToken) {
      weight->row_bytes = add(weight->row_bytes, cells);
    } else {
      weight->page_bytes = add(weight->page_bytes, multiply(cells, pair.rows));
    }
  }
}

Plan::~Plan() = default;

namespace {

// Entries of a program that are emitted together, and their bytes a page.
struct Entries {
  const Entry* data;
  std::size_t count;
  i64 length_bytes;
};

// Appends the runs of spans; a run grows over the next page where both sides touch.
class Emitter {
 public:
  // `out.runs` has room for min(runs_max, what all pages need when none touch).
  Emitter(Batches& out, i64 run_bytes_max, std::size_t runs_max)
      : out_(out), run_bytes_max_(run_bytes_max), runs_max_(runs_max) {}

  // Forgets open runs: the next ones belong to another batch.
  void close() { std::fill(open_.begin(), open_.end(), Open{}); }

  void emit(const Span& span, const Entries& entries) {
    if (open_.size() < entries.count) open_.resize(entries.count);
    out_.length_bytes =
        add(out_.length_bytes, multiply(static_cast<i64>(span.count), entries.length_bytes));
    const std::size_t room = runs_max_ - out_.runs.size();
    if (span.count > room / std::max<std::size_t>(entries.count, 1)) {
      append<true>(span, entries);
    } else {
      append<false>(span, entries);
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
  void append(const Span& span, const Entries& entries) {
    Run* const begin = out_.runs.data();
    Run* next = begin + out_.runs.size();
    for (std::size_t page = 0; page < span.count; ++page) {
      const i64 source_page = span.source_ids[page];
      const i64 destination_page = span.destination_ids[page];
      for (std::size_t index = 0; index < entries.count; ++index) {
        const Entry& entry = entries.data[index];
        Open& open = open_[index];
        const i64 source = entry.source_offset + source_page * entry.source_page_stride;
        const i64 destination =
            entry.destination_offset + destination_page * entry.destination_page_stride;
        if (open.source_end == source && open.destination_end == destination && grow(open, entry)) {
          continue;
        }
        if (kNearLimit && static_cast<std::size_t>(next - begin) == runs_max_) refuse();
        open = {source + entry.length, destination + entry.length, next};
        *next++ = {entry.source_region, source, entry.destination_region, destination,
                   entry.length};
      }
    }
    out_.runs.set_size(static_cast<std::size_t>(next - begin));
  }

  bool grow(Open& open, const Entry& entry) const {
    Run& run = *open.run;
    if (run.source_region != entry.source_region ||
        run.destination_region != entry.destination_region ||
        entry.length > run_bytes_max_ - run.length) {
      return false;
    }
    run.length += entry.length;
    open.source_end += entry.length;
    open.destination_end += entry.length;
    return true;
  }

  [[noreturn]] void refuse() const {
    throw LimitError("the request is cut into more than " + std::to_string(runs_max_) +
                     " runs; send it in smaller chunks");
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
    for (const Span& span : walk.spans) {
      const Program& program = *walk.programs[span.program];
      const std::size_t begin = program.class_begin[layer];
      emitter.emit(span, {program.entries.data() + begin, program.class_begin[layer + 1] - begin,
                          program.class_bytes[layer]});
    }
    end_batch(out);
  }
}

// Page after page, a batch ending when it holds enough bytes.
void emit_pages(const Walk& walk, i64 batch_bytes, Emitter& emitter, Batches& out) {
  i64 left = batch_bytes;
  emitter.close();
  for (Span rest : walk.spans) {
    const Program& program = *walk.programs[rest.program];
    const i64 page_bytes = program.length_bytes;
    while (rest.count > 0) {
      Span now = rest;
      now.count = std::min(rest.count, static_cast<std::size_t>((left - 1) / page_bytes + 1));
      emitter.emit(now, {program.entries.data(), program.entries.size(), page_bytes});
      left -= static_cast<i64>(now.count) * page_bytes;
      if (left <= 0) {
        end_batch(out);
        emitter.close();
        left = batch_bytes;
      }
      rest.source_ids += now.count;
      rest.destination_ids += now.count;
      rest.count -= now.count;
    }
  }
  end_batch(out);
}

}  // namespace

std::shared_ptr<const Program> Plan::program(const Shape& shape) const {
  if (auto found = cache_->find(shape)) return found;
  auto built = std::make_shared<const Program>(
      build_program(groups_[shape.group], pairs_[shape.group], shape, limits_.runs_per_page_max));
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

std::optional<Walk> Plan::walk(const GroupRequest& request,
                               const std::optional<std::vector<i64>>& layers) const {
  if (request.group >= groups_.size()) throw std::invalid_argument("no such group");
  check_request(groups_[request.group], request);
  std::vector<i64> chosen = chosen_layers(request.group, layers);
  if (request.first == request.end || chosen.empty()) return std::nullopt;
  return walk_request(
      groups_[request.group], request, std::move(chosen),
      [this](const Shape& shape) { return program(shape); },
      4 * static_cast<std::size_t>(limits_.runs_per_page_max));
}

Batches Plan::batches(const std::vector<GroupRequest>& requests,
                      const std::optional<std::vector<i64>>& layers, i64 batch_bytes,
                      i64 run_bytes_max) const {
  const auto runs_max = static_cast<std::size_t>(limits_.runs_max);
  std::vector<Walk> walks;
  std::size_t bound = 0;
  for (const GroupRequest& request : requests) {
    std::optional<Walk> walked = walk(request, layers);
    if (!walked.has_value()) continue;
    walks.push_back(*std::move(walked));
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

i64 Plan::expected_bytes(const std::vector<GroupRequest>& requests,
                         const std::optional<std::vector<i64>>& layers) const {
  i64 length_bytes = 0;
  for (const GroupRequest& request : requests) {
    if (request.group >= groups_.size()) throw std::invalid_argument("no such group");
    if (request.first >= request.end) continue;
    const GroupSpec& group = groups_[request.group];
    const i64 tokens = rounded_end(group, request) - request.first;
    const i64 pages = tokens / group.destination.page_size;
    const auto count = [&](const Weight& weight) {
      length_bytes = add(length_bytes, multiply(tokens, weight.row_bytes));
      length_bytes = add(length_bytes, multiply(pages, weight.page_bytes));
    };
    if (!layers.has_value()) {
      count(totals_[request.group]);
      continue;
    }
    for (const Weight& weight : weights_[request.group]) {
      if (std::binary_search(layers->begin(), layers->end(), weight.layer)) count(weight);
    }
  }
  return length_bytes;
}

std::optional<std::size_t> Plan::find_group(std::string_view name) const {
  for (std::size_t at = 0; at < groups_.size(); ++at) {
    if (groups_[at].name == name) return at;
  }
  return std::nullopt;
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
    if (figures.runs > limits_.runs_per_page_max) break;  // enough to tell
  }
  return figures;
}

}  // namespace pdx
