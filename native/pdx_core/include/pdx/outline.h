// A request's runs in outline: what each row needs to be computed alone, in any order, by any
// number of threads. It costs O(pages) where the runs themselves cost O(runs); a GPU fills them in.
//
// Plain structs of int64, so that arrays of them cross a C ABI and a PCIe link as they are.
#pragma once
#include <cstdint>
#include <vector>

namespace pdx {

// One run of every page of a span, relative to page 0 on both sides.
struct OutlineEntry {
  std::int64_t source_offset;
  std::int64_t destination_offset;
  std::int64_t length;
  std::int64_t source_page_stride;
  std::int64_t destination_page_stride;
  std::int64_t source_region;
  std::int64_t destination_region;
  std::int64_t byte;  // bytes of the page's earlier entries
};
static_assert(sizeof(OutlineEntry) == 8 * sizeof(std::int64_t), "rows of an int64 array");

// Pages that follow each other in the id lists of both sides and are cut alike: page by page, each
// entry after the other.
struct OutlineSpan {
  std::int64_t first_row;
  std::int64_t first_byte;            // bytes of all earlier rows
  std::int64_t source_position;       // of the first page's id, in the ids of all groups
  std::int64_t destination_position;  // likewise
  std::int64_t pages;
  std::int64_t first_entry;
  std::int64_t entries;  // 1 or more
  std::int64_t page_bytes;
  std::int64_t source_id_first;  // ids are source_id_first <= id < source_id_end
  std::int64_t source_id_end;
  std::int64_t destination_id_first;
  std::int64_t destination_id_end;
};
static_assert(sizeof(OutlineSpan) == 12 * sizeof(std::int64_t), "rows of an int64 array");

// Rows in the order of Plan::batches. No run grows over the next page: they are the rows that
// Plan::batches makes with run_bytes_max = 0.
struct Outline {
  std::vector<OutlineEntry> entries;
  std::vector<OutlineSpan> spans;  // by first_row, without gaps
  std::int64_t rows = 0;
  std::int64_t length_bytes = 0;
};

}  // namespace pdx
