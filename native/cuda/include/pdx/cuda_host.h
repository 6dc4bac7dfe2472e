// The kernels' work on the CPU, one row after the other: for machines without a GPU, and what
// device results are compared with.
#pragma once
#include "pdx/cuda_copy.h"
#include "pdx/cuda_outline.h"

namespace pdx::cuda {

// Fills `runs` and `staging_offsets`, each of outline.rows. Returns the first bad row or kNoBadRow.
inline u64 host_descriptors(const OutlineView& outline, Run* runs, i64* staging_offsets) {
  u64 first_bad = kNoBadRow;
  for (i64 row = 0; row < outline.rows; ++row) {
    const PlacedRun placed = placed_run(outline, row, &first_bad);
    runs[row] = placed.run;
    staging_offsets[row] = placed.staging_offset;
  }
  return first_bad;
}

// Copies every run. Returns the first bad row or kNoBadRow; bad rows are not copied.
inline u64 host_copies(const CopyView& copies, Direction direction) {
  u64 first_bad = kNoBadRow;
  for (i64 row = 0; row < copies.count; ++row) {
    copy_run(copies, direction, row, {0, 1}, {0, 1}, &first_bad);
  }
  return first_bad;
}

}  // namespace pdx::cuda
