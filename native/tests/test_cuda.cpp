// Bodies of the CUDA kernels on the CPU: rows of outlines against Plan::batches and a loop over
// pages, copies against a loop over bytes, many lanes against one.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "pdx/cuda_host.h"
#include "pdx/plan.h"

namespace {

using pdx::GroupRequest;
using pdx::Outline;
using pdx::Plan;
using pdx::PlanePair;
using pdx::Rows;
using pdx::Run;
using namespace pdx::cuda;

constexpr i64 kLayers = 3;
constexpr i64 kHeads = 2;
constexpr i64 kCell = 24;
constexpr i64 kTokens = 96;
constexpr pdx::PlanLimits kLimits{1 << 20, 1 << 26};

struct Side {
  i64 page_size;
  bool envelope;  // layers inside each page, else apart, each a region of its own

  i64 pages() const { return kTokens / page_size + 4; }
  i64 block() const { return page_size * kHeads * kCell; }
  std::vector<i64> region_bytes() const {
    if (envelope) return {pages() * block() * kLayers};
    return std::vector<i64>(kLayers, pages() * block());
  }
  pdx::PlaneSide plane(i64 layer) const {
    if (envelope) return {0, layer * block(), block() * kLayers, kHeads * kCell, kCell};
    return {layer, 0, block(), kHeads * kCell, kCell};
  }
};

// Two groups of the same planes; the second has reserved pages.
Plan plan_of(const Side& source, const Side& destination) {
  std::vector<PlanePair> pairs;
  for (i64 group = 0; group < 2; ++group) {
    for (i64 layer = 0; layer < kLayers; ++layer) {
      pairs.push_back({group, layer, Rows::kToken, source.page_size, kHeads, kCell,
                       source.plane(layer), destination.plane(layer)});
    }
  }
  const auto group = [&](const char* name, i64 reserved) {
    return pdx::GroupSpec{name,
                          {source.page_size, source.pages(), reserved},
                          {destination.page_size, destination.pages(), reserved}};
  };
  return Plan({group("first", 0), group("second", 1)}, pairs, source.region_bytes(),
              destination.region_bytes(), kLimits);
}

std::vector<i64> shuffled_ids(i64 pages, std::mt19937& random) {
  std::vector<i64> ids(static_cast<std::size_t>(pages) - 1);
  std::iota(ids.begin(), ids.end(), 1);
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

// A request over both groups, and its ids one group after the other.
struct Request {
  std::vector<i64> source_ids;
  std::vector<i64> destination_ids;
  std::vector<GroupRequest> groups;

  Request(const Side& source, const Side& destination, i64 first, i64 end, std::mt19937& random) {
    const auto source_count = static_cast<std::size_t>(source.pages()) - 1;
    const auto destination_count = static_cast<std::size_t>(destination.pages()) - 1;
    for (int group = 0; group < 2; ++group) {
      const std::vector<i64> mine = shuffled_ids(source.pages(), random);
      const std::vector<i64> theirs = shuffled_ids(destination.pages(), random);
      source_ids.insert(source_ids.end(), mine.begin(), mine.end());
      destination_ids.insert(destination_ids.end(), theirs.begin(), theirs.end());
    }
    for (std::size_t group = 0; group < 2; ++group) {
      groups.push_back({group,
                        {source_ids.data() + group * source_count, source_count, 0},
                        {destination_ids.data() + group * destination_count, destination_count, 0},
                        first,
                        end});
    }
  }
};

OutlineView view_of(const Outline& outline, const Request& request) {
  return {outline.entries.data(),
          outline.spans.data(),
          request.source_ids.data(),
          request.destination_ids.data(),
          static_cast<i64>(outline.spans.size()),
          outline.rows};
}

struct Descriptors {
  std::vector<Run> runs;
  std::vector<i64> offsets;
  u64 first_bad;

  explicit Descriptors(const OutlineView& outline)
      : runs(static_cast<std::size_t>(outline.rows)),
        offsets(static_cast<std::size_t>(outline.rows)),
        first_bad(host_descriptors(outline, runs.data(), offsets.data())) {}
};

bool same(const Run& a, const Run& b) { return std::memcmp(&a, &b, sizeof(Run)) == 0; }

void rows_are_those_of_the_plan() {
  std::mt19937 random(7);
  const std::optional<std::vector<i64>> choices[] = {std::nullopt, std::vector<i64>{1},
                                                     std::vector<i64>{0, 2}};
  for (const bool source_envelope : {false, true}) {
    for (const bool destination_envelope : {false, true}) {
      for (const auto& [a, b] : {std::pair<i64, i64>{8, 8}, {16, 4}, {4, 16}, {6, 8}, {1, 8}}) {
        const Side source{a, source_envelope};
        const Side destination{b, destination_envelope};
        const Plan plan = plan_of(source, destination);
        for (const auto& [first, end] : {std::pair<i64, i64>{0, 96}, {5, 37}, {8, 8}, {90, 91}}) {
          const Request request(source, destination, first, end, random);
          for (const auto& layers : choices) {
            const Outline outline = plan.outline(request.groups, layers);
            const pdx::Batches batches = plan.batches(request.groups, layers, 4096, 0);
            CHECK(static_cast<std::size_t>(outline.rows) == batches.runs.size());
            CHECK(outline.length_bytes == batches.length_bytes);
            const Descriptors made(view_of(outline, request));
            CHECK(made.first_bad == kNoBadRow);
            i64 byte = 0;
            for (std::size_t row = 0; row < made.runs.size(); ++row) {
              CHECK(same(made.runs[row], batches.runs[row]));
              CHECK(made.offsets[row] == byte);
              byte += made.runs[row].length;
            }
            CHECK(byte == outline.length_bytes);
          }
        }
      }
    }
  }
}

void an_id_that_changed_moves_nothing() {
  std::mt19937 random(8);
  const Side source{8, false};
  const Side destination{8, true};
  const Plan plan = plan_of(source, destination);
  Request request(source, destination, 0, 96, random);
  const Outline outline = plan.outline(request.groups, std::nullopt);
  const std::size_t second = request.source_ids.size() / 2;
  for (const i64 bad : {i64{-1}, i64{0}, source.pages(), INT64_MAX, INT64_MIN}) {
    for (std::vector<i64>* ids : {&request.source_ids, &request.destination_ids}) {
      const i64 good = (*ids)[second + 2];  // page 2 of the group with a reserved page
      (*ids)[second + 2] = bad;
      const Descriptors made(view_of(outline, request));
      (*ids)[second + 2] = good;
      const auto empty = std::count_if(made.runs.begin(), made.runs.end(),
                                       [](const Run& run) { return run.length == 0; });
      CHECK(empty == kLayers);
      CHECK(made.first_bad < made.runs.size());
      CHECK(made.runs[made.first_bad].length == 0);
      CHECK(std::all_of(made.runs.begin(), made.runs.begin() + static_cast<i64>(made.first_bad),
                        [](const Run& run) { return run.length > 0; }));
    }
  }
}

void an_outline_over_the_limit_is_refused() {
  const Side source{8, false};
  const Plan plan({{"first", {8, 16, 0}, {8, 16, 0}}},
                  {{0, 0, Rows::kToken, 8, kHeads, kCell, source.plane(0), source.plane(0)}},
                  source.region_bytes(), source.region_bytes(), {1 << 10, 3});
  const std::vector<i64> ids{1, 5, 3, 9};
  const auto request = [&](std::size_t pages) {
    return std::vector<GroupRequest>{
        {0, {ids.data(), pages, 0}, {ids.data(), pages, 0}, 0, static_cast<i64>(pages) * 8}};
  };
  CHECK(plan.outline(request(3), std::nullopt).rows == 3);
  CHECK_THROWS(pdx::LimitError, plan.outline(request(4), std::nullopt));
}

void every_alignment_and_length_is_copied() {
  std::vector<unsigned char> from(4096);
  std::mt19937 random(9);
  for (unsigned char& byte : from) byte = static_cast<unsigned char>(random());
  const i64 lengths[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 255, 512, 1000, 2049};
  for (std::size_t source = 0; source < 17; ++source) {
    for (std::size_t target = 0; target < 17; ++target) {
      for (const i64 length : lengths) {
        for (const i64 lanes : {1, 3, 32}) {
          std::vector<unsigned char> to(4096, 0xEE);
          std::vector<unsigned char> expected = to;
          std::copy_n(from.data() + source, length, expected.data() + target);
          for (i64 lane = 0; lane < lanes; ++lane) {
            copy_bytes(to.data() + target, from.data() + source, length, {lane, lanes});
          }
          CHECK(to == expected);
        }
      }
    }
  }
}

// A pool of two regions and runs that touch neither each other nor the edges at random places.
struct Pool {
  std::vector<std::vector<unsigned char>> regions;
  std::vector<u64> addresses;
  std::vector<i64> bytes;
  std::vector<Run> runs;
  std::vector<i64> offsets;
  i64 staged_bytes = 0;

  explicit Pool(std::mt19937& random) {
    for (const std::size_t length : {std::size_t{200'000}, std::size_t{90'001}}) {
      regions.emplace_back(length);
      for (unsigned char& byte : regions.back()) byte = static_cast<unsigned char>(random());
    }
    for (std::size_t region = 0; region < regions.size(); ++region) {
      addresses.push_back(reinterpret_cast<u64>(regions[region].data()));
      bytes.push_back(static_cast<i64>(regions[region].size()));
      for (i64 at = static_cast<i64>(random() % 5); at < bytes.back();) {
        const i64 longest = random() % 8 == 0 ? 50'000 : 300;
        const i64 length = std::min<i64>(1 + random() % longest, bytes.back() - at);
        // Both sides name the same bytes: what is gathered can be scattered back.
        runs.push_back({static_cast<i64>(region), at, static_cast<i64>(region), at, length});
        at += length + static_cast<i64>(random() % 3);
      }
    }
    std::shuffle(runs.begin(), runs.end(), random);
    for (const Run& run : runs) {
      offsets.push_back(staged_bytes);
      staged_bytes += run.length;
    }
  }

  CopyView view(std::vector<unsigned char>& staging) const {
    return {runs.data(),
            offsets.data(),
            static_cast<i64>(runs.size()),
            addresses.data(),
            bytes.data(),
            static_cast<i64>(regions.size()),
            staging.data(),
            static_cast<i64>(staging.size()),
            0};
  }

  std::vector<unsigned char> gathered() const {
    std::vector<unsigned char> staging(static_cast<std::size_t>(staged_bytes));
    for (std::size_t row = 0; row < runs.size(); ++row) {
      for (i64 byte = 0; byte < runs[row].length; ++byte) {
        staging[static_cast<std::size_t>(offsets[row] + byte)] =
            regions[static_cast<std::size_t>(runs[row].source_region)]
                   [static_cast<std::size_t>(runs[row].source_offset + byte)];
      }
    }
    return staging;
  }
};

// As the kernel does it: a grid of warps, their lanes and pieces spread over `threads` threads.
// Under ThreadSanitizer this shows that no byte is written twice.
u64 copies_by_lanes(const CopyView& copies, Direction direction, int threads) {
  constexpr i64 kWarps = 5;
  constexpr i64 kLanes = 8;
  constexpr i64 kPieces = 3;
  u64 first_bad = kNoBadRow;
  std::vector<std::thread> workers;
  for (int thread = 0; thread < threads; ++thread) {
    workers.emplace_back([&, thread] {
      for (i64 turn = thread; turn < kLanes * kPieces; turn += threads) {
        const Turn lane{turn % kLanes, kLanes};
        const Turn piece{turn / kLanes, kPieces};
        for (i64 warp = 0; warp < kWarps; ++warp) {
          for (i64 row = warp; row < copies.count; row += kWarps) {
            copy_run(copies, direction, row, piece, lane, &first_bad);
          }
        }
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  return first_bad;
}

void runs_are_gathered_and_scattered() {
  std::mt19937 random(10);
  for (int turn = 0; turn < 4; ++turn) {
    Pool pool(random);
    const std::vector<unsigned char> expected = pool.gathered();
    std::vector<unsigned char> staging(expected.size());
    CHECK(host_copies(pool.view(staging), Direction::kGather) == kNoBadRow);
    CHECK(staging == expected);
    std::fill(staging.begin(), staging.end(), static_cast<unsigned char>(0));
    CHECK(copies_by_lanes(pool.view(staging), Direction::kGather, 3) == kNoBadRow);
    CHECK(staging == expected);

    for (const bool lanes : {false, true}) {
      std::vector<std::vector<unsigned char>> scattered = pool.regions;
      for (const Run& run : pool.runs) {
        std::fill_n(pool.regions[static_cast<std::size_t>(run.destination_region)].begin() +
                        run.destination_offset,
                    run.length, static_cast<unsigned char>(0));
      }
      const CopyView view = pool.view(staging);
      CHECK((lanes ? copies_by_lanes(view, Direction::kScatter, 3)
                   : host_copies(view, Direction::kScatter)) == kNoBadRow);
      CHECK(pool.regions == scattered);  // bytes between the runs are as they were
    }
  }
}

// Slices of the runs through a staging buffer that holds a part.
void a_part_of_the_runs_passes_a_small_staging_buffer() {
  std::mt19937 random(11);
  const Pool pool(random);
  const std::vector<unsigned char> expected = pool.gathered();
  constexpr std::size_t kRows = 40;
  for (std::size_t begin = 0; begin < pool.runs.size(); begin += kRows) {
    const std::size_t end = std::min(begin + kRows, pool.runs.size());
    const i64 first = pool.offsets[begin];
    const i64 length = pool.offsets[end - 1] + pool.runs[end - 1].length - first;
    std::vector<unsigned char> staging(static_cast<std::size_t>(length));
    CopyView view = pool.view(staging);
    view.runs += begin;
    view.staging_offsets += begin;
    view.count = static_cast<i64>(end - begin);
    view.first_byte = first;
    CHECK(host_copies(view, Direction::kGather) == kNoBadRow);
    CHECK(std::equal(staging.begin(), staging.end(), expected.begin() + first));
  }
}

void runs_that_leave_their_memory_are_not_copied() {
  std::vector<unsigned char> region(64, 1);
  std::vector<unsigned char> staging(64, 2);
  const std::vector<unsigned char> before = staging;
  const u64 address = reinterpret_cast<u64>(region.data());
  const i64 bytes = 64;
  struct Case {
    Run run;
    i64 offset;
  };
  constexpr i64 kMax = INT64_MAX;
  const Case bad[] = {
      {{0, 60, 0, 60, 5}, 0},       {{0, -1, 0, -1, 1}, 0}, {{1, 0, 1, 0, 1}, 0},
      {{-1, 0, -1, 0, 1}, 0},       {{0, 0, 0, 0, -1}, 0},  {{0, kMax, 0, kMax, kMax}, 0},
      {{0, 0, 0, 0, 8}, 60},        {{0, 0, 0, 0, 8}, -1},  {{0, 0, 0, 0, 8}, kMax},
      {{0, 0, 0, 0, 8}, INT64_MIN},
  };
  for (const Case& one : bad) {
    for (const Direction direction : {Direction::kGather, Direction::kScatter}) {
      const Run runs[] = {{0, 0, 0, 0, 0}, one.run};
      const i64 offsets[] = {0, one.offset};
      CopyView view{runs, offsets, 2, &address, &bytes, 1, staging.data(), 64, 0};
      CHECK(host_copies(view, direction) == 1);
      view.first_byte = 1;  // now the empty run lies before the buffer
      CHECK(host_copies(view, direction) == 0);
      CHECK(staging == before);
      CHECK(region == std::vector<unsigned char>(64, 1));
    }
  }
}

void the_first_bad_row_of_many_threads_is_the_lowest() {
  const std::vector<Run> runs(1000, Run{0, 5, 0, 5, 1});
  const std::vector<i64> offsets(1000, 0);
  const u64 address = 0;
  const i64 bytes = 5;
  CopyView view{runs.data(), offsets.data(), 1000, &address, &bytes, 1, nullptr, 1, 0};
  CHECK(copies_by_lanes(view, Direction::kGather, 4) == 0);
  view.count = 0;
  CHECK(copies_by_lanes(view, Direction::kGather, 4) == kNoBadRow);
}

}  // namespace

int main() {
  rows_are_those_of_the_plan();
  an_id_that_changed_moves_nothing();
  an_outline_over_the_limit_is_refused();
  every_alignment_and_length_is_copied();
  runs_are_gathered_and_scattered();
  a_part_of_the_runs_passes_a_small_staging_buffer();
  runs_that_leave_their_memory_are_not_copied();
  the_first_bad_row_of_many_threads_is_the_lowest();
}
