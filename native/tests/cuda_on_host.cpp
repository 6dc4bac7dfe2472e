// The C ABI of libpdx_cuda.so with the CPU as its device: memory is malloc, a stream does its work
// when it is enqueued, kernels are their bodies run row by row. Python tests compile and load it,
// so that all but the launches is tested where there is no GPU.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "pdx/cuda_abi.h"
#include "pdx/cuda_host.h"

// What the next calls return, set by tests.
extern "C" {
PDX_CUDA_EXPORT int test_abi_version = PDX_CUDA_ABI_VERSION;
PDX_CUDA_EXPORT int test_device_count = 1;
PDX_CUDA_EXPORT int test_device_count_result = 0;
PDX_CUDA_EXPORT int test_result = 0;
PDX_CUDA_EXPORT int test_allocations = 0;
PDX_CUDA_EXPORT int test_event_reached = 1;
}

namespace {

int allocate(std::int64_t length_bytes, void** address) {
  if (test_result != 0) return test_result;
  *address = std::malloc(static_cast<std::size_t>(length_bytes));
  ++test_allocations;
  return *address == nullptr ? 2 : 0;
}

int release(void* address) {
  std::free(address);
  --test_allocations;
  return test_result;
}

int copies(const pdx_cuda_copies* given, pdx::cuda::Direction direction, std::uint64_t* first_bad) {
  if (test_result != 0) return test_result;
  const std::uint64_t bad = pdx::cuda::host_copies(
      {reinterpret_cast<const pdx::Run*>(given->runs), given->staging_offsets, given->count,
       given->region_addresses, given->region_bytes, given->regions,
       static_cast<unsigned char*>(given->staging), given->staging_bytes, given->first_byte},
      direction);
  if (bad < *first_bad) *first_bad = bad;
  return 0;
}

}  // namespace

int pdx_cuda_abi_version(void) { return test_abi_version; }
int pdx_cuda_runtime_version(void) { return 13000; }
int pdx_cuda_driver_version(int* version) {
  *version = 13010;
  return 0;
}
int pdx_cuda_device_count(int* count) {
  *count = test_device_count_result == 0 ? test_device_count : 0;
  return test_device_count_result;
}
const char* pdx_cuda_error_name(int code) { return code == 0 ? "cudaSuccess" : "cudaErrorOfTest"; }
const char* pdx_cuda_error_text(int code) { return code == 0 ? "no error" : "as the test wants"; }

int pdx_cuda_descriptors(int, void*, const pdx_cuda_outline* outline, std::int64_t* runs,
                         std::int64_t* staging_offsets, std::uint64_t* first_bad) {
  if (test_result != 0) return test_result;
  const std::uint64_t bad = pdx::cuda::host_descriptors(
      {reinterpret_cast<const pdx::OutlineEntry*>(outline->entries),
       reinterpret_cast<const pdx::OutlineSpan*>(outline->spans), outline->source_ids,
       outline->destination_ids, outline->spans_count, outline->rows},
      reinterpret_cast<pdx::Run*>(runs), staging_offsets);
  if (bad < *first_bad) *first_bad = bad;
  return 0;
}

int pdx_cuda_gather(int, void*, const pdx_cuda_copies* given, std::uint64_t* first_bad) {
  return copies(given, pdx::cuda::Direction::kGather, first_bad);
}
int pdx_cuda_scatter(int, void*, const pdx_cuda_copies* given, std::uint64_t* first_bad) {
  return copies(given, pdx::cuda::Direction::kScatter, first_bad);
}

int pdx_cuda_allocate(int, std::int64_t length_bytes, void** address) {
  return allocate(length_bytes, address);
}
int pdx_cuda_free(int, void* address) { return release(address); }
int pdx_cuda_allocate_pinned(int, std::int64_t length_bytes, void** address) {
  return allocate(length_bytes, address);
}
int pdx_cuda_free_pinned(int, void* address) { return release(address); }
int pdx_cuda_copy(int, void*, void* destination, const void* source, std::int64_t length_bytes) {
  if (test_result != 0) return test_result;
  if (length_bytes > 0) std::memcpy(destination, source, static_cast<std::size_t>(length_bytes));
  return 0;
}
int pdx_cuda_fill(int, void*, void* address, int value, std::int64_t length_bytes) {
  if (test_result != 0) return test_result;
  std::memset(address, value, static_cast<std::size_t>(length_bytes));
  return 0;
}

int pdx_cuda_stream_create(int, void** stream) { return allocate(1, stream); }
int pdx_cuda_stream_destroy(int, void* stream) { return release(stream); }
int pdx_cuda_stream_synchronize(int, void*) { return test_result; }
int pdx_cuda_stream_wait_event(int, void*, void*) { return test_result; }
int pdx_cuda_event_create(int, void** event) { return allocate(1, event); }
int pdx_cuda_event_destroy(int, void* event) { return release(event); }
int pdx_cuda_event_record(int, void*, void*) { return test_result; }
int pdx_cuda_event_query(int, void*, int* reached) {
  *reached = test_result == 0 ? test_event_reached : 0;
  return test_result;
}
