// Plans against a copy cell by cell, bounds near 64 bits, and one plan shared by threads.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "pdx/page_ids.h"
#include "pdx/plan.h"

namespace {

using pdx::Batches;
using pdx::GroupRequest;
using pdx::GroupSpec;
using pdx::Plan;
using pdx::PlanePair;
using pdx::PlaneSide;
using pdx::Rows;
using i64 = std::int64_t;

constexpr i64 kMax = std::numeric_limits<i64>::max();
constexpr pdx::PlanLimits kLimits{1 << 20, 1 << 26};

// Where a side puts (layer, page, row, head): rows before heads or heads before rows, layers apart
// or inside each page.
struct Arrangement {
  bool head_major;
  bool envelope;
  i64 page_size;
  i64 pages;
};

constexpr i64 kLayers = 3;
constexpr i64 kHeads = 2;
constexpr i64 kCell = 8;

PlaneSide side_of(const Arrangement& a, i64 layer) {
  const i64 block = a.page_size * kHeads * kCell;
  const i64 page_stride = a.envelope ? block * kLayers : block;
  const i64 base = layer * (a.envelope ? block : block * a.pages);
  return {0, base, page_stride, a.head_major ? kCell : kHeads * kCell,
          a.head_major ? a.page_size * kCell : kCell};
}

i64 bytes_of(const Arrangement& a) { return a.pages * a.page_size * kHeads * kCell * kLayers; }

Plan plan_of(const Arrangement& source, const Arrangement& destination) {
  std::vector<PlanePair> pairs;
  for (i64 layer = 0; layer < kLayers; ++layer) {
    pairs.push_back({0, layer, Rows::kToken, source.page_size, kHeads, kCell,
                     side_of(source, layer), side_of(destination, layer)});
  }
  const GroupSpec group{
      "full", {source.page_size, source.pages, 1}, {destination.page_size, destination.pages, 1}};
  return Plan({group}, pairs, {bytes_of(source)}, {bytes_of(destination)}, kLimits);
}

std::vector<i64> shuffled_ids(i64 pages, std::mt19937& random) {
  std::vector<i64> ids;
  for (i64 id = 1; id < pages; ++id) ids.push_back(id);
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

// Source offset of every destination byte of tokens [first, end), -1 elsewhere.
std::vector<i64> expected(const Arrangement& source, const std::vector<i64>& source_ids,
                          const Arrangement& destination, const std::vector<i64>& destination_ids,
                          i64 first, i64 end) {
  std::vector<i64> from(static_cast<std::size_t>(bytes_of(destination)), -1);
  for (i64 token = first; token < end; ++token) {
    const auto offset = [&](const Arrangement& a, const std::vector<i64>& ids, i64 layer,
                            i64 head) {
      const PlaneSide at = side_of(a, layer);
      return at.base + ids[static_cast<std::size_t>(token / a.page_size)] * at.page_stride +
             token % a.page_size * at.row_stride + head * at.head_stride;
    };
    for (i64 layer = 0; layer < kLayers; ++layer) {
      for (i64 head = 0; head < kHeads; ++head) {
        const i64 read = offset(source, source_ids, layer, head);
        const i64 write = offset(destination, destination_ids, layer, head);
        for (i64 byte = 0; byte < kCell; ++byte) {
          from[static_cast<std::size_t>(write + byte)] = read + byte;
        }
      }
    }
  }
  return from;
}

void check_request(const Arrangement& source, const Arrangement& destination, i64 first, i64 end,
                   i64 batch_bytes, std::mt19937& random) {
  const Plan plan = plan_of(source, destination);
  const std::vector<i64> source_ids = shuffled_ids(source.pages, random);
  const std::vector<i64> destination_ids = shuffled_ids(destination.pages, random);
  const GroupRequest request{0,
                             {source_ids.data(), source_ids.size(), 0},
                             {destination_ids.data(), destination_ids.size(), 0},
                             first,
                             end};
  const Batches got = plan.batches({request}, std::nullopt, batch_bytes, batch_bytes);

  i64 moved_end = end;
  if (source.page_size == destination.page_size) {
    moved_end = (end + source.page_size - 1) / source.page_size * source.page_size;
  }
  std::vector<i64> from(static_cast<std::size_t>(bytes_of(destination)), -1);
  i64 total = 0;
  for (std::size_t at = 0; at < got.runs.size(); ++at) {
    const pdx::Run& run = got.runs[at];
    CHECK(run.length > 0);
    total += run.length;
    for (i64 byte = 0; byte < run.length; ++byte) {
      i64& where = from[static_cast<std::size_t>(run.destination_offset + byte)];
      CHECK(where == -1);
      where = run.source_offset + byte;
    }
  }
  CHECK(total == got.length_bytes);
  CHECK(total == plan.expected_bytes({request}, std::nullopt));
  const std::vector<i64> layers{0, 2, 7};
  CHECK(plan.expected_bytes({request}, layers) ==
        plan.batches({request}, layers, batch_bytes, batch_bytes).length_bytes);
  CHECK(from == expected(source, source_ids, destination, destination_ids, first, moved_end));
  CHECK(got.splits.front() == 0);
  CHECK(got.splits.back() == static_cast<i64>(got.runs.size()));
  CHECK(std::is_sorted(got.splits.begin(), got.splits.end()));
}

void every_cell_once() {
  std::mt19937 random(7);
  const auto draw = [&](i64 low, i64 high) {
    return std::uniform_int_distribution<i64>(low, high)(random);
  };
  for (int round = 0; round < 400; ++round) {
    const auto arrangement = [&](i64 tokens) {
      const i64 page_size = draw(1, 9);
      return Arrangement{draw(0, 1) == 1, draw(0, 1) == 1, page_size, tokens / page_size + 3};
    };
    const i64 first = draw(0, 20);
    const i64 end = first + draw(1, 30);
    Arrangement source = arrangement(end);
    Arrangement destination = arrangement(end);
    if (draw(0, 2) == 0) {
      destination.page_size = source.page_size;
      destination.pages = source.pages + 1;
    }
    check_request(source, destination, first, end, draw(0, 1) == 1 ? 64 : 1 << 20, random);
  }
}

Batches one_run(const Plan& plan, i64 source_id, i64 destination_id) {
  return plan.batches({{0, {&source_id, 1, 0}, {&destination_id, 1, 0}, 0, 1}}, std::nullopt, kMax,
                      kMax);
}

Plan plan_of_sides(PlaneSide source, PlaneSide destination, i64 pages, i64 heads, i64 cell,
                   i64 region_bytes) {
  return Plan({{"full", {1, pages, 0}, {1, pages, 0}}},
              {{0, 0, Rows::kToken, 1, heads, cell, source, destination}}, {region_bytes},
              {region_bytes}, kLimits);
}

void bounds() {
  // The last byte of the largest region.
  const i64 half = kMax / 2;
  const Plan wide =
      plan_of_sides({0, kMax - 2 * half, half, 0, 0}, {0, 0, half, 0, 0}, 2, 1, half, kMax);
  const Batches last = one_run(wide, 1, 1);
  CHECK(last.runs.size() == 1);
  CHECK(last.runs[0].source_offset + last.runs[0].length == kMax);
  CHECK(last.length_bytes == half);

  const PlaneSide fits{0, 0, 8, 8, 8};
  CHECK_THROWS(std::invalid_argument, plan_of_sides({0, 1, 8, 8, 8}, fits, 4, 1, 8, 32));
  CHECK_THROWS(std::invalid_argument, plan_of_sides(fits, {0, 1, 8, 8, 8}, 4, 1, 8, 32));
  CHECK_THROWS(std::invalid_argument, plan_of_sides({1, 0, 8, 8, 8}, fits, 4, 1, 8, 32));
  CHECK_THROWS(std::invalid_argument, plan_of_sides({0, -8, 8, 8, 8}, fits, 4, 1, 8, 32));
  CHECK_THROWS(std::invalid_argument, plan_of_sides({0, 0, -8, 8, 8}, fits, 4, 1, 8, 32));
  CHECK_THROWS(std::invalid_argument, plan_of_sides(fits, fits, 0, 1, 8, 32));
  CHECK_THROWS(std::overflow_error, plan_of_sides({0, 0, kMax, 8, 8}, fits, 4, 1, 8, kMax));
  CHECK_THROWS(std::overflow_error, plan_of_sides({0, kMax, 8, 8, 8}, fits, 4, 1, 8, kMax));
  CHECK_THROWS(std::overflow_error, plan_of_sides({0, 0, 8, 8, kMax}, fits, 4, 3, 8, kMax));

  const Plan plan = plan_of_sides(fits, fits, 4, 1, 8, 32);
  for (const i64 id : {i64{-1}, i64{4}, i64{1} << 40, kMax, std::numeric_limits<i64>::min()}) {
    CHECK_THROWS(std::invalid_argument, one_run(plan, id, 0));
    CHECK_THROWS(std::invalid_argument, one_run(plan, 0, id));
  }
  const i64 ids[2] = {1, 1};
  const auto request = [&](i64 first_token, i64 first, i64 end) {
    return GroupRequest{0, {ids, 2, first_token}, {ids, 1, first_token}, first, end};
  };
  const auto runs = [&](const GroupRequest& asked) {
    return plan.batches({asked}, std::nullopt, kMax, kMax);
  };
  CHECK(runs(request(kMax - 1, kMax - 1, kMax)).runs.size() == 1);
  CHECK_THROWS(std::invalid_argument, runs(request(0, 0, kMax)));
  CHECK_THROWS(std::invalid_argument, runs(request(0, 0, 2)));
  CHECK_THROWS(std::invalid_argument, runs(request(5, 4, 6)));
  CHECK_THROWS(std::invalid_argument, runs(request(0, 2, 1)));
  CHECK_THROWS(std::invalid_argument, runs(request(-1, 0, 1)));
  CHECK_THROWS(std::invalid_argument, runs({0, {ids, 2, 0}, {ids, 2, 0}, 0, 2}));
  // Ids are checked beyond the range too, and where the range is empty.
  const i64 beyond[2] = {1, 4};
  CHECK_THROWS(std::invalid_argument, runs({0, {beyond, 2, 0}, {ids, 1, 0}, 0, 1}));
  CHECK_THROWS(std::invalid_argument, runs({0, {ids, 1, 0}, {beyond, 2, 0}, 0, 0}));
  CHECK(plan.expected_bytes({request(0, 0, 1)}, std::nullopt) == 8);
  CHECK(plan.find_group("full") == std::optional<std::size_t>(0));
  CHECK(!plan.find_group("ful").has_value());
  CHECK_THROWS(std::invalid_argument, runs({1, {ids, 2, 0}, {ids, 2, 0}, 0, 1}));
}

void limits() {
  const PlaneSide fits{0, 0, 8, 8, 8};
  const Plan plan({{"full", {1, 64, 0}, {1, 64, 0}}},
                  {{0, 0, Rows::kToken, 1, 2, 4, fits, {0, 0, 16, 8, 4}}}, {1 << 10}, {1 << 11},
                  {2, 4});
  const std::vector<i64> ids{9, 7, 5, 3};
  const auto runs = [&](i64 count) {
    return plan.batches({{0, {ids.data(), 4, 0}, {ids.data(), 4, 0}, 0, count}}, std::nullopt, 1,
                        1);
  };
  CHECK(runs(2).runs.size() == 4);
  CHECK_THROWS(pdx::LimitError, runs(3));

  // Page sizes without a common divisor cut every page in another way.
  const Plan coprime({{"full", {61, 6, 0}, {59, 6, 0}}},
                     {{0, 0, Rows::kToken, 61, 1, 4, {0, 0, 61 * 8, 8, 8}, {0, 0, 59 * 8, 8, 8}}},
                     {61 * 48}, {59 * 48}, {61, 1 << 20});
  const std::vector<i64> few{0, 1, 2, 3, 4, 5};
  const auto coprime_runs = [&](i64 end) {
    return coprime.batches({{0, {few.data(), 6, 0}, {few.data(), 6, 0}, 0, end}}, std::nullopt, 1,
                           1);
  };
  CHECK(coprime_runs(200).runs.size() == 200);
  CHECK_THROWS(pdx::LimitError, coprime_runs(300));
  CHECK(coprime.describe(0).runs > 0);

  // Merged runs count once, however many pages they hold.
  const Plan merging({{"full", {1, 64, 0}, {1, 64, 0}}},
                     {{0, 0, Rows::kToken, 1, 1, 8, fits, fits}}, {1 << 10}, {1 << 10}, {2, 4});
  std::vector<i64> following(60);
  for (std::size_t at = 0; at < following.size(); ++at) following[at] = static_cast<i64>(at) + 2;
  const Batches merged = merging.batches(
      {{0, {following.data(), 60, 0}, {following.data(), 60, 0}, 0, 60}}, std::nullopt, kMax, kMax);
  CHECK(merged.runs.size() == 1);
  CHECK(merged.length_bytes == 480);
}

void large_requests_are_mapped() {
  const i64 pages = 300'001;
  const PlaneSide side{0, 0, 8, 8, 8};
  const Plan plan = plan_of_sides(side, side, pages, 1, 8, pages * 8);
  std::vector<i64> ids;
  for (i64 id = pages - 1; id > 0; --id) ids.push_back(id);
  const Batches got =
      plan.batches({{0, {ids.data(), ids.size(), 0}, {ids.data(), ids.size(), 0}, 0, pages - 1}},
                   std::nullopt, kMax, kMax);
  CHECK(got.runs.size() == ids.size());
  CHECK(got.runs[ids.size() - 1].source_offset == 8);
}

void tiles_and_states() {
  const PlaneSide side{0, 0, 24, 4, 12};
  const auto plan_with = [&](Rows kind, i64 rows, i64 page_size) {
    return Plan({{"full", {page_size, 4, 0}, {page_size, 4, 0}}},
                {{0, 0, kind, rows, 2, 4, side, side}}, {96}, {96}, kLimits);
  };
  const i64 id = 2;
  const auto runs = [&](const Plan& plan, i64 first, i64 end) {
    return plan.batches({{0, {&id, 1, 0}, {&id, 1, 0}, first, end}}, std::nullopt, kMax, kMax);
  };
  const Batches state = runs(plan_with(Rows::kWhole, 3, 1), 0, 1);
  CHECK(state.runs.size() == 1);
  CHECK(state.length_bytes == 24);
  CHECK(plan_with(Rows::kWhole, 3, 1)
            .expected_bytes({{0, {&id, 1, 0}, {&id, 1, 0}, 0, 1}}, std::nullopt) == 24);
  const Plan tile = plan_with(Rows::kTile, 1, 8);
  CHECK(runs(tile, 0, 3).length_bytes == 8);
  CHECK_THROWS(std::invalid_argument, runs(tile, 1, 8));
}

void threads_share_a_plan() {
  const Plan plan = plan_of({false, true, 16, 60}, {true, false, 7, 140});
  std::mt19937 random(3);
  const std::vector<i64> source = shuffled_ids(60, random);
  const std::vector<i64> destination = shuffled_ids(140, random);
  const auto digest = [&](i64 first) {
    const Batches got = plan.batches({{0,
                                       {source.data(), source.size(), 0},
                                       {destination.data(), destination.size(), 0},
                                       first,
                                       first + 200}},
                                     std::nullopt, 4096, 4096);
    std::uint64_t sum = got.runs.size();
    for (std::size_t at = 0; at < got.runs.size(); ++at) {
      sum = sum * 31 + static_cast<std::uint64_t>(got.runs[at].destination_offset);
    }
    return sum;
  };
  std::vector<std::uint64_t> sums(4 * 64);
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::size_t first = 0; first < 64; ++first) {
        sums[thread * 64 + first] = digest(static_cast<i64>(first));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t at = 0; at < sums.size(); ++at) CHECK(sums[at] == sums[at % 64]);
}

void page_ids() {
  const i64 ids[4] = {3, 5, 4, 5};
  CHECK(pdx::first_bad_id(ids, 4, 3, 6) == -1);
  CHECK(pdx::first_bad_id(ids, 4, 4, 6) == 0);
  CHECK(pdx::first_bad_id(ids, 4, 3, 5) == 1);
  CHECK(pdx::first_repeated_id(ids, 3, 6) == -1);
  CHECK(pdx::first_repeated_id(ids, 4, 6) == 3);
  CHECK(pdx::first_repeated_id(ids, 3, kMax) == -1);
  CHECK(pdx::first_repeated_id(ids, 4, kMax) == 3);
}

}  // namespace

int main() {
  every_cell_once();
  bounds();
  limits();
  large_requests_are_mapped();
  tiles_and_states();
  threads_share_a_plan();
  page_ids();
}
