// Rows in tiles, rounded to 8 bits with a scale for each 32 inputs.
#pragma once

#include <string.h>

#include "buffer.h"
#include "grouped_layout.h"
#include "kernels.h"
#include "outliers.h"
#include "threads.h"
#include "tiles.h"

namespace {

// Rows by 16 (kTileRows), in units of 32 or 16 inputs. Of each unit there are 16 of each number.
struct RoundedRows {
  int8_t *codes;    // [rows / 16][inputs / 32][16][32], -127 to 127
  float *scales;    // [rows / 16][inputs / 32][16]
  float *sums;      // [rows / 16][units][16] of the rounded values
  int32_t *starts;  // the same of the codes, times -zero
  Outlier *outliers;  // [rows / 16][inputs / 32 * 16], by input and row; their codes are 0
  int32_t *counts;    // [rows / 16] of outliers
  bool halves;      // whether a unit has 16 inputs
  int32_t zero;     // code of weights that stands for 0
};

inline void store_sum(const RoundedRows &to, int64_t at, int32_t sum, float scale) {
  to.sums[at] = scale * static_cast<float>(sum);
  to.starts[at] = -to.zero * sum;
}

inline float bfloat16(int32_t bits) {
  const int32_t wide = bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

// 32 inputs of a row as codes of 8 bits.
struct RoundedBlock {
  __m512i codes[2];
  float scale;          // NaN if an input is none or infinite
  __mmask32 is_outlier;  // at most one input, whose code is 0
};

// Returns the leading bits of a number: those of bfloat16.
inline int16_t to_bits(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return static_cast<int16_t>(bits >> 16);
}

constexpr int32_t kInfinity = 0x7f80;  // bits in bfloat16; those of NaNs are larger

// Returns the largest of 32 numbers without sign. bfloat16 numbers are in the order of their bits.
inline int32_t largest_of(__m512i sizes) {
  const __m256i half =
      _mm256_max_epu16(_mm512_castsi512_si256(sizes), _mm512_extracti64x4_epi64(sizes, 1));
  const __m128i eight =
      _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i inverted = _mm_xor_si128(eight, _mm_set1_epi16(-1));
  return 0xffff & ~_mm_cvtsi128_si32(_mm_minpos_epu16(inverted));
}

inline RoundedBlock round_block(const uint16_t *values) {
  __m512i both = _mm512_loadu_si512(values);
  const __m512i sizes = _mm512_and_si512(both, _mm512_set1_epi16(0x7fff));
  const int32_t largest = largest_of(sizes);
  float most = bfloat16(largest);
  __mmask32 is_outlier = _mm512_cmpgt_epu16_mask(sizes, _mm512_set1_epi16(to_bits(most * kMostRest)));
  if (__builtin_popcount(is_outlier) == 1) {
    const float rest = bfloat16(largest_of(_mm512_maskz_mov_epi16(~is_outlier, sizes)));
    if (rest >= kLeastRest) {
      both = _mm512_maskz_mov_epi16(~is_outlier, both);
      most = rest;
    } else {
      is_outlier = 0;
    }
  } else {
    is_outlier = 0;
  }
  const __m512 inverse = _mm512_set1_ps(most > 0 ? 127.0f / most : 0.0f);
  const __m512 low = to_float(_mm512_castsi512_si256(both));
  const __m512 high = to_float(_mm512_extracti64x4_epi64(both, 1));
  return {{_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)),
           _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse))},
          largest >= kInfinity ? __builtin_nanf("") : most / 127.0f,
          is_outlier};
}

inline void store_block(const RoundedBlock &from, const RoundedRows &to, int64_t block,
                        int64_t row) {
  auto *codes = reinterpret_cast<__m128i *>(to.codes + (block * kTileRows + row) * kTileInner);
  int32_t sums[2];
  for (int64_t half = 0; half < 2; half++) {
    _mm_store_si128(codes + half, _mm512_cvtepi32_epi8(from.codes[half]));
    sums[half] = _mm512_reduce_add_epi32(from.codes[half]);
  }
  to.scales[block * kTileRows + row] = from.scale;
  if (!to.halves) return store_sum(to, block * kTileRows + row, sums[0] + sums[1], from.scale);
  for (int64_t half = 0; half < 2; half++)
    store_sum(to, (2 * block + half) * kTileRows + row, sums[half], from.scale);
}

// Rounds all rows of a product. The result is valid until the thread's next call.
inline RoundedRows round_rows(const tw_linear &a, bool halves) {
  static thread_local Buffer memory[6];
  const int64_t strips = divide_up(a.num_rows, kTileRows), blocks = a.inputs / kTileInner;
  const int64_t numbers = strips * blocks * kTileRows;
  const RoundedRows rows{static_cast<int8_t *>(memory[0].reserve(numbers * kTileInner)),
                         static_cast<float *>(memory[1].reserve(numbers * 4)),
                         static_cast<float *>(memory[2].reserve(numbers * 8)),
                         static_cast<int32_t *>(memory[3].reserve(numbers * 8)),
                         static_cast<Outlier *>(memory[4].reserve(numbers * static_cast<int64_t>(sizeof(Outlier)))),
                         static_cast<int32_t *>(memory[5].reserve(strips * 4)),
                         halves,
                         zero_of(coding_of(*a.groups))};
  const auto *tiles = static_cast<const uint16_t *>(a.rows);
  parallel_for(strips, [&](int64_t strip) {
    const int64_t first = strip * kTileRows, count = smaller(kTileRows, a.num_rows - first);
    Outlier *next = rows.outliers + strip * blocks * kTileRows;
    for (int64_t block = 0; block < blocks; block++)
      for (int64_t row = 0; row < count; row++) {
        const uint16_t *from = tiles + tiled(first + row, block * kTileInner, a.inputs);
        const RoundedBlock rounded = round_block(from);
        store_block(rounded, rows, strip * blocks + block, row);
        if (!rounded.is_outlier) continue;
        const int32_t at = __builtin_ctz(rounded.is_outlier);
        *next++ = {static_cast<int32_t>(block * kTileInner) + at, static_cast<int32_t>(first + row),
                   bfloat16(from[at])};
      }
    rows.counts[strip] = static_cast<int32_t>(next - (rows.outliers + strip * blocks * kTileRows));
  });
  return rows;
}

// The same, but returns the rounded values in tiles, and outliers as they are.
inline const uint16_t *round_tiles(const tw_linear &a) {
  static thread_local Buffer memory;
  const int64_t strips = divide_up(a.num_rows, kTileRows), blocks = a.inputs / kTileInner;
  auto *to = static_cast<uint16_t *>(
      memory.reserve(divide_up(a.num_rows, kPair) * kPair * a.inputs * 2));
  const auto *from = static_cast<const uint16_t *>(a.rows);
  parallel_for(strips, [&](int64_t strip) {
    const int64_t first = strip * kTileRows, last = smaller(first + kTileRows, a.num_rows);
    for (int64_t block = 0; block < blocks; block++)
      for (int64_t row = first; row < last; row++) {
        const int64_t at = tiled(row, block * kTileInner, a.inputs);
        const RoundedBlock rounded = round_block(from + at);
        const __m512 scale = _mm512_set1_ps(rounded.scale);
        const __m512 low = _mm512_mul_ps(_mm512_cvtepi32_ps(rounded.codes[0]), scale);
        const __m512 high = _mm512_mul_ps(_mm512_cvtepi32_ps(rounded.codes[1]), scale);
        const auto line = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        _mm512_store_si512(to + at, _mm512_mask_mov_epi16(line, rounded.is_outlier,
                                                          _mm512_loadu_si512(from + at)));
      }
  });
  return to;
}

// Rows of int8 with a scale each. 64 inputs take the place of 32 in bfloat16.
struct WholeRows {
  const uint16_t *tiles;
  const float *scales;  // NaN if an input is none or infinite
};

// Returns the bits of the largest number of a row without its sign.
inline int32_t largest_of(const uint16_t *row, int64_t blocks) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t block = 0; block < blocks; block++)
    largest = _mm512_max_epu16(
        largest, _mm512_and_si512(_mm512_loadu_si512(row + block * kPair * kTileInner),
                                  _mm512_set1_epi16(0x7fff)));
  return largest_of(largest);
}

// Rounds all rows of a product to 8 bits. The result is valid until the thread's next call.
inline WholeRows round_whole_rows(const tw_linear &a) {
  static thread_local Buffer memory[2];
  const int64_t blocks = a.inputs / kTileInner;
  auto *to = static_cast<uint16_t *>(
      memory[0].reserve(divide_up(a.num_rows, kPair) * kPair * a.inputs));
  auto *scales = static_cast<float *>(memory[1].reserve(a.num_rows * 4));
  const auto *from = static_cast<const uint16_t *>(a.rows);
  parallel_for(divide_up(a.num_rows, kTileRows), [&](int64_t strip) {
    const int64_t first = strip * kTileRows, last = smaller(first + kTileRows, a.num_rows);
    for (int64_t row = first; row < last; row++) {
      const uint16_t *values = from + tiled(row, 0, a.inputs);
      const int32_t largest = largest_of(values, blocks);
      const float most = bfloat16(largest);
      scales[row] = largest >= kInfinity ? __builtin_nanf("") : most / 127.0f;
      const __m512 inverse = _mm512_set1_ps(most > 0 ? 127.0f / most : 0.0f);
      for (int64_t block = 0; block < blocks; block++) {
        const __m512i both = _mm512_loadu_si512(values + block * kPair * kTileInner);
        const __m512 low = to_float(_mm512_castsi512_si256(both));
        const __m512 high = to_float(_mm512_extracti64x4_epi64(both, 1));
        auto *codes = reinterpret_cast<__m128i *>(to + tiled(row, block / 2 * kTileInner, a.inputs / 2));
        codes += block % 2 * 2;
        _mm_store_si128(codes, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse))));
        _mm_store_si128(codes + 1,
                        _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(high, inverse))));
      }
    }
  });
  return {to, scales};
}

}  // namespace
