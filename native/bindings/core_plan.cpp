// pdxfer._core: compiled plans.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "core_bindings.h"
#include "core_requests.h"
#include "pdx/page_ids.h"
#include "pdx/plan.h"

namespace nb = nanobind;

namespace pdx::bindings {
namespace {

using Ids = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PairRows = nb::ndarray<const std::int64_t, nb::shape<-1, 16>, nb::c_contig, nb::device::cpu>;
using RunRows = nb::ndarray<nb::numpy, std::int64_t, nb::shape<-1, 5>>;
using EntryRows = nb::ndarray<nb::numpy, std::int64_t, nb::shape<-1, 8>>;
using SpanRows = nb::ndarray<nb::numpy, std::int64_t, nb::shape<-1, 12>>;
using Splits = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

// name, then page_size, pages, reserved_pages of the source and of the destination.
using GroupTuple = std::tuple<std::string, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                              std::int64_t, std::int64_t>;
// group, source ids, their first token, destination ids, their first token, first token, end token.
using RequestTuple =
    std::tuple<std::size_t, Ids, std::int64_t, Ids, std::int64_t, std::int64_t, std::int64_t>;

PlanePair pair_of_row(const std::int64_t* row) {
  if (row[2] < 0 || row[2] > 2) throw std::invalid_argument("no such kind of rows");
  return {.group = row[0],
          .layer = row[1],
          .rows_kind = static_cast<Rows>(row[2]),
          .rows = row[3],
          .heads = row[4],
          .cell_bytes = row[5],
          .source = {row[6], row[7], row[8], row[9], row[10]},
          .destination = {row[11], row[12], row[13], row[14], row[15]}};
}

void construct(Plan* self, const std::vector<GroupTuple>& groups, PairRows pairs,
               std::vector<std::int64_t> source_region_bytes,
               std::vector<std::int64_t> destination_region_bytes, std::int64_t runs_per_page_max,
               std::int64_t runs_max) {
  std::vector<GroupSpec> specs;
  for (const auto& [name, sp, sn, sr, dp, dn, dr] : groups) {
    specs.push_back({name, {sp, sn, sr}, {dp, dn, dr}});
  }
  std::vector<PlanePair> rows;
  rows.reserve(pairs.shape(0));
  for (std::size_t at = 0; at < pairs.shape(0); ++at) {
    rows.push_back(pair_of_row(pairs.data() + at * 16));
  }
  new (self) Plan(std::move(specs), std::move(rows), std::move(source_region_bytes),
                  std::move(destination_region_bytes), {runs_per_page_max, runs_max});
}

RunRows rows_of(Batches& batches) {
  auto* runs = new RunBuffer(std::move(batches.runs));
  nb::capsule owner(runs, [](void* memory) noexcept { delete static_cast<RunBuffer*>(memory); });
  return RunRows(&runs->data()->source_region, {runs->size(), 5}, owner);
}

Splits splits_of(Batches& batches) {
  auto* splits = new std::vector<std::int64_t>(std::move(batches.splits));
  nb::capsule owner(splits, [](void* memory) noexcept {
    delete static_cast<std::vector<std::int64_t>*>(memory);
  });
  return Splits(splits->data(), {splits->size()}, owner);
}

std::vector<GroupRequest> requests_of(const std::vector<RequestTuple>& tuples) {
  std::vector<GroupRequest> requests;
  requests.reserve(tuples.size());
  for (const auto& [group, source, source_first, destination, destination_first, first, end] :
       tuples) {
    requests.push_back({group,
                        {source.data(), source.shape(0), source_first},
                        {destination.data(), destination.shape(0), destination_first},
                        first,
                        end});
  }
  return requests;
}

// Structs of int64 as rows of an array.
template <typename Rows, typename Struct>
Rows struct_rows(std::vector<Struct>& structs) {
  auto* kept = new std::vector<Struct>(std::move(structs));
  nb::capsule owner(
      kept, [](void* memory) noexcept { delete static_cast<std::vector<Struct>*>(memory); });
  return Rows(kept->data(), {kept->size(), sizeof(Struct) / sizeof(std::int64_t)}, owner);
}

std::tuple<EntryRows, SpanRows, std::int64_t, std::int64_t> outline_of(
    const Plan& self, const std::vector<RequestTuple>& requests,
    const std::optional<std::vector<std::int64_t>>& layers) {
  const std::vector<GroupRequest> groups = requests_of(requests);
  Outline outline = [&] {
    const nb::gil_scoped_release released;
    return self.outline(groups, layers);
  }();
  const auto [rows, length_bytes] = std::pair(outline.rows, outline.length_bytes);
  return {struct_rows<EntryRows>(outline.entries), struct_rows<SpanRows>(outline.spans), rows,
          length_bytes};
}

std::tuple<RunRows, Splits, std::int64_t, std::int64_t> batches_of(
    const Plan& self, nb::handle ranges, nb::handle source, nb::handle destination,
    const std::optional<std::vector<std::int64_t>>& layers, std::int64_t batch_bytes,
    std::int64_t run_bytes_max) {
  const ReadRequests read(self, ranges, source, destination);
  std::int64_t expected_bytes = 0;
  Batches batches = [&] {
    const nb::gil_scoped_release released;
    Batches made = self.batches(read.requests(), layers, batch_bytes, run_bytes_max);
    expected_bytes = self.expected_bytes(read.requests(), layers);
    return made;
  }();
  const std::int64_t length_bytes = batches.length_bytes;
  return {rows_of(batches), splits_of(batches), length_bytes, expected_bytes};
}

auto describe_of(const Plan& self, std::size_t group) {
  const nb::gil_scoped_release released;
  const Description figures = self.describe(group);
  return std::tuple(figures.tokens, figures.runs, figures.length_bytes, figures.longest_run,
                    figures.shortest_run);
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::exception<LimitError>(m, "LimitError", PyExc_RuntimeError);
  nb::class_<Plan>(m, "Plan", "Matched plane pairs, compiled; any thread may use it.")
      .def("__init__", &construct, nb::arg("groups"), nb::arg("pairs"),
           nb::arg("source_region_bytes"), nb::arg("destination_region_bytes"),
           nb::arg("runs_per_page_max"), nb::arg("runs_max"))
      .def("batches", &batches_of, nb::arg("ranges"), nb::arg("source"), nb::arg("destination"),
           nb::arg("layers").none(), nb::arg("batch_bytes"), nb::arg("run_bytes_max"),
           "Runs int64 [n, 5], splits int64 [batches + 1], bytes of a request, bytes expected.")
      .def("outline", &outline_of, nb::arg("requests"), nb::arg("layers").none(),
           "Entries int64 [e, 8], spans int64 [s, 12], rows, bytes of a request.")
      .def("describe", &describe_of, nb::arg("group"),
           "Tokens, runs, bytes, longest and shortest run of one period of a group's pages.");
  m.def(
      "first_bad_id",
      [](Ids ids, std::int64_t reserved_pages, std::int64_t pages) {
        return first_bad_id(ids.data(), ids.shape(0), reserved_pages, pages);
      },
      nb::arg("ids"), nb::arg("reserved_pages"), nb::arg("pages"),
      "Position of the first id outside [reserved_pages, pages), or -1.");
  m.def(
      "first_repeated_id",
      [](Ids ids, std::int64_t pages) {
        if (first_bad_id(ids.data(), ids.shape(0), 0, pages) >= 0) {
          throw std::invalid_argument("an id is outside the pool");
        }
        return first_repeated_id(ids.data(), ids.shape(0), pages);
      },
      nb::arg("ids"), nb::arg("pages"), "Position of the first id that appeared before, or -1.");
}

}  // namespace pdx::bindings
