// Rows of an outline, each computed alone: the body of the descriptor kernel.
#pragma once
#include "pdx/cuda_portable.h"
#include "pdx/outline.h"
#include "pdx/run_buffer.h"

namespace pdx::cuda {

// An outline and the page ids it speaks of, in memory that the executing processor reads.
struct OutlineView {
  const OutlineEntry* entries;
  const OutlineSpan* spans;
  const i64* source_ids;
  const i64* destination_ids;
  i64 spans_count;  // 1 or more
  i64 rows;
};

// A run and where it lies in the contiguous staging buffer of all runs.
struct PlacedRun {
  Run run;
  i64 staging_offset;
};

// The span that holds `row`: the last one that begins at or before it.
PDX_HOST_DEVICE inline const OutlineSpan& span_of(const OutlineView& outline, i64 row) {
  i64 low = 0;
  i64 high = outline.spans_count;
  while (high - low > 1) {
    const i64 middle = low + (high - low) / 2;
    if (outline.spans[middle].first_row <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return outline.spans[low];
}

// Row `row` of the outline. An id outside its pool (ids are read when the kernel runs, and whoever
// owns them may have changed them since they were checked) gives a run of length 0 and reports the
// row: no address is made from it.
PDX_HOST_DEVICE inline PlacedRun placed_run(const OutlineView& outline, i64 row, u64* first_bad) {
  const OutlineSpan& span = span_of(outline, row);
  const i64 page = (row - span.first_row) / span.entries;
  const i64 index = (row - span.first_row) % span.entries;
  const OutlineEntry& entry = outline.entries[span.first_entry + index];
  const i64 source_id = outline.source_ids[span.source_position + page];
  const i64 destination_id = outline.destination_ids[span.destination_position + page];
  PlacedRun placed{{entry.source_region, 0, entry.destination_region, 0, 0},
                   span.first_byte + page * span.page_bytes + entry.byte};
  if (source_id < span.source_id_first || source_id >= span.source_id_end ||
      destination_id < span.destination_id_first || destination_id >= span.destination_id_end) {
    report_bad_row(first_bad, row);
    return placed;
  }
  placed.run.source_offset = entry.source_offset + source_id * entry.source_page_stride;
  placed.run.destination_offset =
      entry.destination_offset + destination_id * entry.destination_page_stride;
  placed.run.length = entry.length;
  return placed;
}

}  // namespace pdx::cuda
