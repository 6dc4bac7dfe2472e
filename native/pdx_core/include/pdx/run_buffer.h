// Runs, and the memory that holds them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

namespace pdx {

// One contiguous copy.
struct Run {
  std::int64_t source_region;
  std::int64_t source_offset;
  std::int64_t destination_region;
  std::int64_t destination_offset;
  std::int64_t length;
};
static_assert(sizeof(Run) == 5 * sizeof(std::int64_t), "runs are rows of an int64 array");

// Runs in memory that can be handed over without a copy. Room is taken once: pages of it that are
// never written cost nothing.
class RunBuffer {
 public:
  RunBuffer() = default;
  // Throws std::bad_alloc.
  explicit RunBuffer(std::size_t capacity);
  RunBuffer(RunBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        mapped_bytes_(std::exchange(other.mapped_bytes_, 0)) {}
  RunBuffer& operator=(RunBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    return *this;
  }
  ~RunBuffer();

  std::size_t size() const { return size_; }
  Run* data() { return data_; }
  const Run& operator[](std::size_t index) const { return data_[index]; }
  void set_size(std::size_t size) { size_ = size; }
  // Gives back what lies behind the last run.
  void fit();

 private:
  Run* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t mapped_bytes_ = 0;  // 0: from malloc
};

}  // namespace pdx
