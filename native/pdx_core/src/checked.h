// Sums and products that cannot wrap.
#pragma once
#include <cstdint>
#include <stdexcept>

namespace pdx {

using i64 = std::int64_t;

inline i64 add(i64 a, i64 b) {
  i64 sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) throw std::overflow_error("a sum leaves 64 bits");
  return sum;
}

inline i64 multiply(i64 a, i64 b) {
  i64 product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw std::overflow_error("a product leaves 64 bits");
  }
  return product;
}

}  // namespace pdx
