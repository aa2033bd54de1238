// Products of bytes on AVX-512 VNNI: one instruction adds the products of four inputs to the sums of
// 16 columns. The weights have no sign, the rows have one.
#pragma once

#include "tiles.h"

namespace {

using Four __attribute__((may_alias)) = int32_t;  // inputs, a byte each

// Adds to each row's sums the products with four inputs of 16 outputs. kStride: bytes between rows.
template <int kRows, int64_t kStride>
TW_ALWAYS_INLINE inline void multiply_four(const int8_t *rows, __m512i weights, __m512i *sums) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
    // For the intrinsic, GCC loads the inputs in an instruction of their own.
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(sums[r])
        : "v"(weights), "m"(*reinterpret_cast<const Four *>(rows + r * kStride)));
}

// The same for two tiles, whose sums follow each other. Each row's inputs are loaded once.
template <int kRows, int64_t kStride>
TW_ALWAYS_INLINE inline void multiply_four(const int8_t *rows, __m512i left, __m512i right,
                                           __m512i *sums) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    const Four four = *reinterpret_cast<const Four *>(rows + r * kStride);
    const __m512i inputs = _mm512_set1_epi32(four);
    sums[r] = _mm512_dpbusd_epi32(sums[r], left, inputs);
    sums[kRows + r] = _mm512_dpbusd_epi32(sums[kRows + r], right, inputs);
    // Has the compiler add here: it would load all inputs before, and spill them.
    asm volatile("" : "+v"(sums[r]), "+v"(sums[kRows + r]));
  }
}

}  // namespace
