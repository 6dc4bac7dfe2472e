#include "pdx/run_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace pdx {

namespace {
// From here on memory is mapped in huge pages: the page faults of small ones would cost more than
// writing the runs.
constexpr std::size_t kMappedFromBytes = std::size_t{4} << 20;

std::size_t page_multiple(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}
}  // namespace

RunBuffer::RunBuffer(std::size_t capacity) {
  const std::size_t bytes = capacity * sizeof(Run);
  if (bytes < kMappedFromBytes) {
    data_ = static_cast<Run*>(std::malloc(std::max(bytes, sizeof(Run))));
    if (data_ == nullptr) throw std::bad_alloc();
    return;
  }
  const std::size_t length = page_multiple(bytes);
  void* mapped = mmap(nullptr, length, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  madvise(mapped, length, MADV_HUGEPAGE);  // advice only: where it is refused small pages serve
  data_ = static_cast<Run*>(mapped);
  mapped_bytes_ = length;
}

RunBuffer::~RunBuffer() {
  if (mapped_bytes_ == 0) {
    std::free(data_);
  } else {
    munmap(data_, mapped_bytes_);
  }
}

void RunBuffer::fit() {
  const std::size_t used = std::max(size_ * sizeof(Run), sizeof(Run));
  if (mapped_bytes_ == 0) {
    if (void* fitted = std::realloc(data_, used); fitted != nullptr) {
      data_ = static_cast<Run*>(fitted);
    }
    return;
  }
  const std::size_t kept = page_multiple(used);
  if (kept < mapped_bytes_) {
    munmap(reinterpret_cast<char*>(data_) + kept, mapped_bytes_ - kept);
    mapped_bytes_ = kept;
  }
}

}  // namespace pdx
