/* C ABI of libpdx_cuda.so: descriptors, gather and scatter on a GPU, and the little of the CUDA
 * runtime that their callers need. Loaded when asked for; nothing else links it.
 *
 * Results   0 or a cudaError_t. An error of earlier asynchronous work may come out of any later
 *           call; after one that breaks the context (an illegal address, say) every call fails.
 * Streams   a cudaStream_t of any CUDA runtime in the process, 0 the legacy default stream. Calls
 *           that take one only enqueue: arrays and staging belong to the call until the stream has
 *           passed it. Order with other streams by events: record one after the work that must come
 *           first, let the other stream wait for it.
 * Devices   `device` is an ordinal; the calling thread's current context is put back before a call
 *           returns.
 * Memory    "device address" is memory that the device can reach: cudaMalloc, pinned host memory.
 * Threads   any.
 */
#ifndef PDX_CUDA_ABI_H
#define PDX_CUDA_ABI_H
#include <stdint.h>

#define PDX_CUDA_ABI_VERSION 1
#define PDX_CUDA_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Device addresses of an outline's arrays (pdx/outline.h). */
struct pdx_cuda_outline {
  const int64_t* entries; /* [entries][8] */
  const int64_t* spans;   /* [spans][12] */
  const int64_t* source_ids;
  const int64_t* destination_ids;
  int64_t spans_count;
  int64_t rows;
};

/* Device addresses of runs and of both ends of their copies (pdx/cuda_copy.h). */
struct pdx_cuda_copies {
  const int64_t* runs; /* [count][5] */
  const int64_t* staging_offsets;
  int64_t count;
  const uint64_t* region_addresses;
  const int64_t* region_bytes;
  int64_t regions;
  void* staging; /* holds bytes [first_byte, first_byte + staging_bytes) of all runs */
  int64_t staging_bytes;
  int64_t first_byte;
  int64_t longest_bytes; /* of the runs: how many warps a run gets; any value gives right bytes */
};

PDX_CUDA_EXPORT int pdx_cuda_abi_version(void);
PDX_CUDA_EXPORT int pdx_cuda_runtime_version(void);
PDX_CUDA_EXPORT int pdx_cuda_driver_version(int* version);
PDX_CUDA_EXPORT int pdx_cuda_device_count(int* count);
PDX_CUDA_EXPORT const char* pdx_cuda_error_name(int code);
PDX_CUDA_EXPORT const char* pdx_cuda_error_text(int code);

/* Fills runs [rows][5] and staging_offsets [rows]. `first_bad` (all three: device addresses) is
 * lowered to the first row that named an id outside its pool, so set it to all ones before. */
PDX_CUDA_EXPORT int pdx_cuda_descriptors(int device, void* stream,
                                         const struct pdx_cuda_outline* outline, int64_t* runs,
                                         int64_t* staging_offsets, uint64_t* first_bad);

/* Source side of the runs to staging; staging to destination side. `first_bad` as above: rows that
 * leave their region or the staging buffer, which are not copied. */
PDX_CUDA_EXPORT int pdx_cuda_gather(int device, void* stream, const struct pdx_cuda_copies* copies,
                                    uint64_t* first_bad);
PDX_CUDA_EXPORT int pdx_cuda_scatter(int device, void* stream, const struct pdx_cuda_copies* copies,
                                     uint64_t* first_bad);

PDX_CUDA_EXPORT int pdx_cuda_allocate(int device, int64_t length_bytes, void** address);
PDX_CUDA_EXPORT int pdx_cuda_free(int device, void* address);
/* Pinned host memory, reachable from every device at the same address. */
PDX_CUDA_EXPORT int pdx_cuda_allocate_pinned(int device, int64_t length_bytes, void** address);
PDX_CUDA_EXPORT int pdx_cuda_free_pinned(int device, void* address);
/* Either side may be host or device memory. Asynchronous where the host memory is pinned. */
PDX_CUDA_EXPORT int pdx_cuda_copy(int device, void* stream, void* destination, const void* source,
                                  int64_t length_bytes);
PDX_CUDA_EXPORT int pdx_cuda_fill(int device, void* stream, void* address, int value,
                                  int64_t length_bytes);

PDX_CUDA_EXPORT int pdx_cuda_stream_create(int device, void** stream);
PDX_CUDA_EXPORT int pdx_cuda_stream_destroy(int device, void* stream);
PDX_CUDA_EXPORT int pdx_cuda_stream_synchronize(int device, void* stream);
PDX_CUDA_EXPORT int pdx_cuda_stream_wait_event(int device, void* stream, void* event);
PDX_CUDA_EXPORT int pdx_cuda_event_create(int device, void** event);
PDX_CUDA_EXPORT int pdx_cuda_event_destroy(int device, void* event);
PDX_CUDA_EXPORT int pdx_cuda_event_record(int device, void* event, void* stream);
/* *reached: 1 when the stream has passed the event, else 0. Never waits. */
PDX_CUDA_EXPORT int pdx_cuda_event_query(int device, void* event, int* reached);

#ifdef __cplusplus
}
#endif
#endif
