// One warp a run, or more where runs are long.
#include <algorithm>

#include "current_device.h"
#include "pdx/cuda_abi.h"
#include "pdx/cuda_copy.h"

namespace pdx::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWarps = 8;  // of a block
constexpr i64 kBlocksMax = 1 << 20;
constexpr i64 kPieceWarpsMax = 64;  // of one run

template <Direction kDirection>
__global__ void __launch_bounds__(kLanes* kWarps) copies(CopyView view, u64* first_bad) {
  const Turn lane{threadIdx.x % kLanes, kLanes};
  const Turn piece{blockIdx.y, gridDim.y};
  const i64 warps = static_cast<i64>(gridDim.x) * kWarps;
  for (i64 row = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / kLanes; row < view.count;
       row += warps) {
    copy_run(view, kDirection, row, piece, lane, first_bad);
  }
}

template <Direction kDirection>
int launch(int device, void* stream, const pdx_cuda_copies* given, u64* first_bad) {
  if (given->count < 0 || given->regions < 0 || given->first_byte < 0) return cudaErrorInvalidValue;
  if (given->count == 0) return cudaSuccess;
  const CopyView view{reinterpret_cast<const pdx::Run*>(given->runs),
                      given->staging_offsets,
                      given->count,
                      given->region_addresses,
                      given->region_bytes,
                      given->regions,
                      static_cast<unsigned char*>(given->staging),
                      given->staging_bytes,
                      given->first_byte};
  return on_device(device, [&] {
    const i64 blocks = std::min((given->count - 1) / kWarps + 1, kBlocksMax);
    const i64 pieces = std::clamp(given->longest_bytes / kPieceBytes, i64{1}, kPieceWarpsMax);
    copies<kDirection><<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(pieces)),
                         kLanes * kWarps, 0, static_cast<cudaStream_t>(stream)>>>(view, first_bad);
    return cudaGetLastError();
  });
}

}  // namespace
}  // namespace pdx::cuda

int pdx_cuda_gather(int device, void* stream, const pdx_cuda_copies* copies, uint64_t* first_bad) {
  return pdx::cuda::launch<pdx::cuda::Direction::kGather>(device, stream, copies, first_bad);
}

int pdx_cuda_scatter(int device, void* stream, const pdx_cuda_copies* copies, uint64_t* first_bad) {
  return pdx::cuda::launch<pdx::cuda::Direction::kScatter>(device, stream, copies, first_bad);
}
