// What lets one function be part of a kernel and of a test on the CPU.
#pragma once
#include <cstdint>
#include <cstring>
#ifndef __CUDA_ARCH__
#include <atomic>
#endif

#ifdef __CUDACC__
#define PDX_HOST_DEVICE __host__ __device__
#else
#define PDX_HOST_DEVICE
#endif

namespace pdx::cuda {

using i64 = std::int64_t;
using u64 = std::uint64_t;

constexpr u64 kNoBadRow = ~u64{0};

// Lowers `*first_bad` to `row`; many threads may do so at once.
PDX_HOST_DEVICE inline void report_bad_row(u64* first_bad, i64 row) {
#ifdef __CUDA_ARCH__
  atomicMin(reinterpret_cast<unsigned long long*>(first_bad), static_cast<unsigned long long>(row));
#else
  const std::atomic_ref<u64> word(*first_bad);
  u64 before = word.load(std::memory_order_relaxed);
  while (static_cast<u64>(row) < before &&
         !word.compare_exchange_weak(before, static_cast<u64>(row), std::memory_order_relaxed)) {
  }
#endif
}

// One aligned access of `Word`; on the CPU by memcpy, which breaks no aliasing rule, after the
// check that a GPU makes.
template <typename Word>
PDX_HOST_DEVICE inline Word load(const unsigned char* address) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const Word*>(address);
#else
  if (reinterpret_cast<u64>(address) % alignof(Word) != 0) __builtin_trap();
  Word word;
  std::memcpy(&word, address, sizeof(Word));
  return word;
#endif
}

template <typename Word>
PDX_HOST_DEVICE inline void store(unsigned char* address, Word word) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<Word*>(address) = word;
#else
  if (reinterpret_cast<u64>(address) % alignof(Word) != 0) __builtin_trap();
  std::memcpy(address, &word, sizeof(Word));
#endif
}

}  // namespace pdx::cuda
