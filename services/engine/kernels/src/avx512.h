// Products of 2 x 2 tiles on AVX-512 BF16: one instruction adds the products of two inputs to the
// sums of 16 columns.
#pragma once

#include <string.h>

#include "tiles.h"

namespace {

// Keys of a decode in one span: two spans fit in the L1 cache.
constexpr int64_t kDecodeKeys = 64;
constexpr bool kPrefetchesAlong = false;

inline void prefetch_line(const void *line) {
  _mm_prefetch(static_cast<const char *>(line), _MM_HINT_T0);
}

constexpr int kGroup = 8;  // rows whose sums with 32 columns stay in registers

// Two lines of each tile of a step: the weights of two pairs of inputs.
struct Lines {
  __m512i left[2], right[2];
};

TW_ALWAYS_INLINE inline Lines lines_of(const Factors &at, int64_t pair) {
  const uint16_t *left = at.left + pair * kPair, *right = at.right + pair * kPair;
  return {{_mm512_loadu_si512(left), _mm512_loadu_si512(left + kPair)},
          {_mm512_loadu_si512(right), _mm512_loadu_si512(right + kPair)}};
}

// Adds the products of a step with the left and the right tile to the sums.
template <int kRows, typename Step>
TW_ALWAYS_INLINE inline void multiply_step(const Step &at, __m512 *left, __m512 *right) {
#pragma GCC unroll 2
  for (int64_t first = 0; first < kTileRows; first += 2) {
    const Lines lines = lines_of(at, first);
#pragma GCC unroll 2
    for (int64_t second = 0; second < 2; second++) {
      auto left_line = reinterpret_cast<__m512bh>(lines.left[second]);
      auto right_line = reinterpret_cast<__m512bh>(lines.right[second]);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        int inputs;
        memcpy(&inputs, at.rows + r * at.row_stride + 2 * (first + second), sizeof inputs);
        auto row = reinterpret_cast<__m512bh>(_mm512_set1_epi32(inputs));
        left[r] = _mm512_dpbf16_ps(left[r], row, left_line);
        right[r] = _mm512_dpbf16_ps(right[r], row, right_line);
      }
    }
  }
}

// Computes sums [kRows, 32] = `from` (null: zero) + the products of factors(0) to factors(steps -
// 1).
template <int kRows, typename Steps>
inline void multiply_group(const float *from, float *sums, int64_t stride, int64_t steps,
                           const Steps &factors) {
  __m512 left[kRows], right[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    left[r] = from ? _mm512_loadu_ps(from + r * stride) : _mm512_setzero_ps();
    right[r] = from ? _mm512_loadu_ps(from + r * stride + kTileRows) : _mm512_setzero_ps();
  }
  for (int64_t step = 0; step < steps; step++) multiply_step<kRows>(factors(step), left, right);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    _mm512_storeu_ps(sums + r * stride, left[r]);
    _mm512_storeu_ps(sums + r * stride + kTileRows, right[r]);
  }
}

// multiply_group of 1 to 8 rows.
template <typename Steps>
inline void multiply_group(int64_t rows, const float *from, float *sums, int64_t stride,
                           int64_t steps, const Steps &factors) {
  switch (rows) {
    case 1: return multiply_group<1>(from, sums, stride, steps, factors);
    case 2: return multiply_group<2>(from, sums, stride, steps, factors);
    case 3: return multiply_group<3>(from, sums, stride, steps, factors);
    case 4: return multiply_group<4>(from, sums, stride, steps, factors);
    case 5: return multiply_group<5>(from, sums, stride, steps, factors);
    case 6: return multiply_group<6>(from, sums, stride, steps, factors);
    case 7: return multiply_group<7>(from, sums, stride, steps, factors);
    default: return multiply_group<kGroup>(from, sums, stride, steps, factors);
  }
}

// multiply_group of up to 32 rows.
template <typename Steps>
inline void multiply_block(int64_t rows, const float *from, float *sums, int64_t stride,
                           int64_t steps, const Steps &factors) {
  for (int64_t first = 0; first < rows; first += kGroup) {
    auto group = [&](int64_t step) {
      auto at = factors(step);
      at.rows += first * at.row_stride;
      return at;
    };
    multiply_group(smaller(kGroup, rows - first), from ? from + first * stride : nullptr,
                   sums + first * stride, stride, steps, group);
  }
}

// No-ops: AVX-512 has no tile registers to configure (amx.h).
inline void configure_tiles(int64_t) {}
inline void release_tiles() {}

}  // namespace
