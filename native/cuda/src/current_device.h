// The device of one call.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace pdx::cuda {

// The result of a call; one that failed is also forgotten by the runtime, which would report it
// again after the next kernel launch.
inline int result(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
  return static_cast<int>(code);
}

// Makes a device current for one scope and then puts the thread's context back as it was, whatever
// runtime had set it. cudaSetDevice could not do that: it creates the primary context of the device
// it names, hundreds of MiB of memory on a device that nobody uses.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    saved_ = driver().get != nullptr && driver().get(&before_) == CUDA_SUCCESS;
    error_ = cudaSetDevice(device);
  }
  ~CurrentDevice() {
    if (saved_) driver().set(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  cudaError_t error() const { return error_; }

 private:
  struct Driver {
    CUresult (*get)(CUcontext*) = nullptr;
    CUresult (*set)(CUcontext) = nullptr;
  };

  // libcuda is reached through the runtime, which loads it where it is.
  static const Driver& driver() {
    static const Driver found = [] {
      Driver driver;
      driver.get = reinterpret_cast<decltype(driver.get)>(entry_point("cuCtxGetCurrent"));
      driver.set = reinterpret_cast<decltype(driver.set)>(entry_point("cuCtxSetCurrent"));
      if (driver.set == nullptr) driver.get = nullptr;
      return driver;
    }();
    return found;
  }

  static void* entry_point(const char* name) {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t code =
        cudaGetDriverEntryPointByVersion(name, &address, CUDART_VERSION, cudaEnableDefault, &found);
    if (result(code) != 0 || found != cudaDriverEntryPointSuccess) return nullptr;
    return address;
  }

  CUcontext before_ = nullptr;
  bool saved_ = false;
  cudaError_t error_ = cudaSuccess;
};

// Runs `call` with `device` current.
template <typename Call>
int on_device(int device, const Call& call) {
  const CurrentDevice current(device);
  return result(current.error() == cudaSuccess ? call() : current.error());
}

}  // namespace pdx::cuda
