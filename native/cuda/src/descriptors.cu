// One thread a row of the outline.
#include <algorithm>

#include "current_device.h"
#include "pdx/cuda_abi.h"
#include "pdx/cuda_outline.h"

namespace pdx::cuda {
namespace {

constexpr int kThreads = 256;
constexpr i64 kBlocksMax = 1 << 20;

__global__ void __launch_bounds__(kThreads)
    descriptors(OutlineView outline, Run* runs, i64* staging_offsets, u64* first_bad) {
  const i64 threads = static_cast<i64>(gridDim.x) * kThreads;
  for (i64 row = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; row < outline.rows;
       row += threads) {
    const PlacedRun placed = placed_run(outline, row, first_bad);
    runs[row] = placed.run;
    staging_offsets[row] = placed.staging_offset;
  }
}

}  // namespace
}  // namespace pdx::cuda

int pdx_cuda_descriptors(int device, void* stream, const pdx_cuda_outline* outline, int64_t* runs,
                         int64_t* staging_offsets, uint64_t* first_bad) {
  using namespace pdx::cuda;
  if (outline->rows < 0 || (outline->rows > 0 && outline->spans_count < 1)) {
    return cudaErrorInvalidValue;
  }
  if (outline->rows == 0) return cudaSuccess;
  const OutlineView view{reinterpret_cast<const pdx::OutlineEntry*>(outline->entries),
                         reinterpret_cast<const pdx::OutlineSpan*>(outline->spans),
                         outline->source_ids,
                         outline->destination_ids,
                         outline->spans_count,
                         outline->rows};
  return on_device(device, [&] {
    const i64 blocks = std::min((outline->rows - 1) / kThreads + 1, kBlocksMax);
    descriptors<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        view, reinterpret_cast<pdx::Run*>(runs), staging_offsets, first_bad);
    return cudaGetLastError();
  });
}
