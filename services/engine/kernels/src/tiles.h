// Tiled layout of activations, weights and caches (16 rows by 64 bytes), and vector arithmetic.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "integers.h"

// Forces inlining: a call would spill the sums from their registers.
#define TW_ALWAYS_INLINE __attribute__((always_inline))

namespace {

constexpr int64_t kTile = 512;     // bfloat16 elements in a tile
constexpr int64_t kTileRows = 16;  // rows of a tile: rows of a product, or pairs of its inner index
constexpr int64_t kTileInner = 32;
constexpr int64_t kPair = 2 * kTileRows;  // rows and columns that a 2 x 2 block of tiles covers
// A result larger than two L2 caches leaves them before it is read. Whole lines of it are written
// past the caches, which would otherwise fetch every line first.
constexpr int64_t kMostCached = 4 << 20;  // bytes

// Returns the index of an element of a tiled activation [rows, width]: blocks of 32 rows by 32
// columns keep a tile's elements together.
inline int64_t tiled(int64_t row, int64_t column, int64_t width) {
  return (row / kPair * (width / kTileInner) + column / kTileInner) * (kPair * kTileInner) +
         row % kPair * kTileInner + column % kTileInner;
}

// Factors of one step of a product: rows of 32 inputs, and two tiles of 16 columns.
struct Factors {
  const uint16_t *rows;
  int64_t row_stride;
  const uint16_t *left, *right;
};

inline __m256i to_bfloat16(__m512 values) {
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values));
}

inline __m512 to_float(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

constexpr float kLog2E = 1.44269504088896341f;

// Returns 2^x with a relative error of 3e-6 (polynomial over [-1/2, 1/2]), ample for bfloat16.
inline __m512 exp2(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));
  __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(9.6003955171e-03f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5916893825e-02f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4023718463e-01f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312199484e-01f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// Returns tanh(x) with an absolute error of 2e-6.
inline __m512 tanh(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  __m512 power = exp2(_mm512_mul_ps(x, _mm512_set1_ps(2 * kLog2E)));
  return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one)));
}

// Returns x * (1 + erf(x / sqrt(2))) / 2, with erf to 1.5e-7 (Abramowitz and Stegun 7.1.26).
inline __m512 gelu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  __m512 size = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678118654752f));
  __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(size, _mm512_set1_ps(0.3275911f), one));
  __m512 p = _mm512_set1_ps(1.061405429f);
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
  __m512 power = exp2(_mm512_mul_ps(_mm512_mul_ps(size, size), _mm512_set1_ps(-kLog2E)));
  __m512 tail = _mm512_mul_ps(_mm512_mul_ps(p, t), power);  // 1 - erf(size)
  __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  __m512 sum = _mm512_mask_mov_ps(_mm512_sub_ps(_mm512_set1_ps(2.0f), tail), negative, tail);
  return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), sum);
}

// Returns x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2.
inline __m512 gelu_tanh(__m512 x) {
  const __m512 half = _mm512_set1_ps(0.5f);
  __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f * 0.7978845608f),
                                 _mm512_set1_ps(0.7978845608f));
  __m512 curve = tanh(_mm512_mul_ps(x, cubic));
  return _mm512_mul_ps(x, _mm512_fmadd_ps(curve, half, half));
}

inline __m512 silu(__m512 x) {
  __m512 decay = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2E)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), decay));
}

inline float power_of_two(float x) { return _mm512_cvtss_f32(exp2(_mm512_set1_ps(x))); }

}  // namespace
