#include "pdx/page_ids.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "checked.h"

namespace pdx {

i64 first_bad_id(const i64* ids, std::size_t count, i64 reserved_pages, i64 pages) {
  // Without a way out of the loop it compiles to vector instructions; bad ids are rare.
  bool bad = false;
  for (std::size_t at = 0; at < count; ++at) bad |= (ids[at] < reserved_pages) | (ids[at] >= pages);
  if (!bad) return -1;
  const i64* const found =
      std::find_if(ids, ids + count, [&](i64 id) { return id < reserved_pages || id >= pages; });
  return found - ids;
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
