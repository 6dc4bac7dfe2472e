// The little of the CUDA runtime that callers need: devices, memory, streams, events.
#include <cuda_runtime_api.h>

#include "current_device.h"
#include "pdx/cuda_abi.h"

using pdx::cuda::on_device;
using pdx::cuda::result;

namespace {

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(void* event) { return static_cast<cudaEvent_t>(event); }

}  // namespace

int pdx_cuda_abi_version(void) { return PDX_CUDA_ABI_VERSION; }
int pdx_cuda_runtime_version(void) { return CUDART_VERSION; }
int pdx_cuda_driver_version(int* version) { return result(cudaDriverGetVersion(version)); }
int pdx_cuda_device_count(int* count) { return result(cudaGetDeviceCount(count)); }

const char* pdx_cuda_error_name(int code) {
  return cudaGetErrorName(static_cast<cudaError_t>(code));
}
const char* pdx_cuda_error_text(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

int pdx_cuda_allocate(int device, int64_t length_bytes, void** address) {
  if (length_bytes < 1) return cudaErrorInvalidValue;
  return on_device(device,
                   [&] { return cudaMalloc(address, static_cast<std::size_t>(length_bytes)); });
}

int pdx_cuda_free(int device, void* address) {
  return on_device(device, [&] { return cudaFree(address); });
}

int pdx_cuda_allocate_pinned(int device, int64_t length_bytes, void** address) {
  if (length_bytes < 1) return cudaErrorInvalidValue;
  return on_device(device, [&] {
    return cudaHostAlloc(address, static_cast<std::size_t>(length_bytes), cudaHostAllocPortable);
  });
}

int pdx_cuda_free_pinned(int device, void* address) {
  return on_device(device, [&] { return cudaFreeHost(address); });
}

int pdx_cuda_copy(int device, void* stream, void* destination, const void* source,
                  int64_t length_bytes) {
  if (length_bytes < 0) return cudaErrorInvalidValue;
  return on_device(device, [&] {
    return cudaMemcpyAsync(destination, source, static_cast<std::size_t>(length_bytes),
                           cudaMemcpyDefault, as_stream(stream));
  });
}

int pdx_cuda_fill(int device, void* stream, void* address, int value, int64_t length_bytes) {
  if (length_bytes < 0) return cudaErrorInvalidValue;
  return on_device(device, [&] {
    return cudaMemsetAsync(address, value, static_cast<std::size_t>(length_bytes),
                           as_stream(stream));
  });
}

// Not ordered with the legacy default stream: only events order it.
int pdx_cuda_stream_create(int device, void** stream) {
  return on_device(device, [&] {
    return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream),
                                     cudaStreamNonBlocking);
  });
}

int pdx_cuda_stream_destroy(int device, void* stream) {
  return on_device(device, [&] { return cudaStreamDestroy(as_stream(stream)); });
}

int pdx_cuda_stream_synchronize(int device, void* stream) {
  return on_device(device, [&] { return cudaStreamSynchronize(as_stream(stream)); });
}

int pdx_cuda_stream_wait_event(int device, void* stream, void* event) {
  return on_device(device,
                   [&] { return cudaStreamWaitEvent(as_stream(stream), as_event(event), 0); });
}

int pdx_cuda_event_create(int device, void** event) {
  return on_device(device, [&] {
    return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming);
  });
}

int pdx_cuda_event_destroy(int device, void* event) {
  return on_device(device, [&] { return cudaEventDestroy(as_event(event)); });
}

int pdx_cuda_event_record(int device, void* event, void* stream) {
  return on_device(device, [&] { return cudaEventRecord(as_event(event), as_stream(stream)); });
}

int pdx_cuda_event_query(int device, void* event, int* reached) {
  *reached = 0;
  return on_device(device, [&] {
    const cudaError_t code = cudaEventQuery(as_event(event));
    if (code == cudaErrorNotReady) {
      cudaGetLastError();  // the runtime would report it again after the next launch
      return cudaSuccess;
    }
    *reached = code == cudaSuccess ? 1 : 0;
    return code;
  });
}
