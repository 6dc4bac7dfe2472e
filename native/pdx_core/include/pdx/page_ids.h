// Checks of page ids.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pdx {

// Position of the first id outside [reserved_pages, pages), or -1.
std::int64_t first_bad_id(const std::int64_t* ids, std::size_t count, std::int64_t reserved_pages,
                          std::int64_t pages);

// Position of the first id that appeared before, or -1. All ids are in [0, pages).
std::int64_t first_repeated_id(const std::int64_t* ids, std::size_t count, std::int64_t pages);

}  // namespace pdx
