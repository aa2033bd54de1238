// Rows rounded to codes of 8 bits, with a scale for each 32 inputs: a block.
#pragma once

#include <string.h>

#include "buffer.h"
#include "exponential.h"
#include "grouped_forms.h"
#include "grouped_layout.h"
#include "integers.h"
#include "outliers.h"
#include "scalars.h"
#include "threads.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// Rows by four (kRowsAtOnce), whose blocks follow each other: [rows / 4][blocks][4] of each.
struct Rows {
  int8_t *codes;     // [32], -127 to 127
  int16_t *wide;     // the same in 16 bits, each four in the order 0 2 1 3; null: unused
  float *scales;
  float *sums;       // of the rounded values in each group: [groups of a block] before [4]
  int32_t *starts;   // see start_of: [runs of a block] before [4]
  Outlier *outliers;  // [rows][blocks], of which the first of each row are set; their codes are 0
  int32_t *counts;    // [rows] of outliers
  int64_t blocks;
  int parts, runs;  // of a block
  int32_t zero;     // of codes without a sign
};

// Sums of the codes of 16 inputs: of the first two of each four, and of the last two.
struct HalfSums {
  int32_t first, last;
};

// Returns what sums of products start with, so that they become those of weights whose codes are less
// by `zero`. In 16 bits, it is the start of each of the two sums of an output.
inline int32_t start_of(HalfSums sums, int32_t zero) {
  if (!kSixteenBits) return -zero * (sums.first + sums.last);
  const auto first = static_cast<uint32_t>(-zero * sums.first) & 0xffff;
  return static_cast<int32_t>(first | static_cast<uint32_t>(-zero * sums.last) << 16);
}

// Returns the largest size of 32 values but one.
inline float largest_but(const float *values, int64_t but) {
  float largest = 0;
  for (int64_t i = 0; i < kBlock; i++)
    if (i != but) largest = maximum(largest, __builtin_fabsf(values[i]));
  return largest;
}

#if defined(__AVX2__)

inline float highest(__m256 v) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline float total(__m256 v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// Rounds 32 values to codes of one scale, and writes the sums of codes. A NaN or an infinity
// makes the scale NaN. Returns the number of an outlier, or -1.
inline int64_t round_block(const float *values, int8_t *codes, HalfSums *sums, float *scale) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 parts[4], largest = _mm256_setzero_ps(), broken = _mm256_setzero_ps();
  for (int i = 0; i < 4; i++) {
    parts[i] = _mm256_loadu_ps(values + 8 * i);
    largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, parts[i]));
    broken = _mm256_fmadd_ps(parts[i], _mm256_setzero_ps(), broken);
  }
  float most = highest(largest);
  const __m256 neighbours = _mm256_set1_ps(most * kMostRest);
  uint32_t above = 0;
  for (int i = 0; i < 4; i++) {
    const __m256 size = _mm256_andnot_ps(sign, parts[i]);
    const int mask = _mm256_movemask_ps(_mm256_cmp_ps(size, neighbours, _CMP_GT_OQ));
    above |= static_cast<uint32_t>(mask) << 8 * i;
  }
  int64_t outlier = -1;
  if (above && !(above & (above - 1))) {
    const int at = __builtin_ctz(above);
    const float rest = largest_but(values, at);
    if (rest >= kLeastRest) {
      const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
      const __m256i is_outlier = _mm256_cmpeq_epi32(lanes, _mm256_set1_epi32(at % 8));
      parts[at / 8] = _mm256_andnot_ps(_mm256_castsi256_ps(is_outlier), parts[at / 8]);
      outlier = at;
      most = rest;
    }
  }
  const __m256 inverse = _mm256_set1_ps(most > 0 ? 127.0f / most : 0.0f);
  __m256i whole[4];
  for (int i = 0; i < 4; i++) whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(parts[i], inverse));
  __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]),
                                     _mm256_packs_epi32(whole[2], whole[3]));
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(codes), bytes);
  __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
  pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0x4e));
  pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0xb1));
  const int32_t halves[] = {_mm256_extract_epi32(pairs, 0), _mm256_extract_epi32(pairs, 4)};
  for (int i = 0; i < 2; i++) sums[i] = {static_cast<int16_t>(halves[i]), halves[i] >> 16};
  *scale = most / 127.0f + total(broken);
  return outlier;
}

#elif defined(__aarch64__)

// Rounds 32 values to codes of one scale, and writes the sums of codes. A NaN or an infinity
// makes the scale NaN. Returns the number of an outlier, or -1.
inline int64_t round_block(const float *values, int8_t *codes, HalfSums *sums, float *scale) {
  float32x4_t parts[8], largest = vdupq_n_f32(0), broken = vdupq_n_f32(0);
  for (int i = 0; i < 8; i++) {
    parts[i] = vld1q_f32(values + 4 * i);
    largest = vmaxnmq_f32(largest, vabsq_f32(parts[i]));
    broken = vfmaq_f32(broken, parts[i], vdupq_n_f32(0));
  }
  float most = vmaxnmvq_f32(largest);
  const float32x4_t neighbours = vdupq_n_f32(most * kMostRest);
  int count = 0;  // of values above
  for (int i = 0; i < 8; i++)
    count -= vaddvq_s32(vreinterpretq_s32_u32(vcagtq_f32(parts[i], neighbours)));
  int64_t outlier = -1;
  if (count == 1) {
    int64_t at = 0;
    while (!(__builtin_fabsf(values[at]) > most * kMostRest)) at++;
    const float rest = largest_but(values, at);
    if (rest >= kLeastRest) {
      float four[4];
      vst1q_f32(four, parts[at / 4]);
      four[at % 4] = 0;
      parts[at / 4] = vld1q_f32(four);
      outlier = at;
      most = rest;
    }
  }
  const float32x4_t inverse = vdupq_n_f32(most > 0 ? 127.0f / most : 0.0f);
  for (int i = 0; i < 2; i++) {
    int16x4_t words[4];
    for (int j = 0; j < 4; j++)
      words[j] = vqmovn_s32(vcvtnq_s32_f32(parts[4 * i + j] * inverse));
    const int8x16_t bytes = vcombine_s8(vqmovn_s16(vcombine_s16(words[0], words[1])),
                                        vqmovn_s16(vcombine_s16(words[2], words[3])));
    vst1q_s8(codes + 16 * i, bytes);
    sums[i] = {vaddlvq_s8(bytes), 0};
  }
  *scale = most / 127.0f + vaddvq_f32(broken);
  return outlier;
}

#else

// Rounds 32 values to codes of one scale, and writes the sums of codes. A NaN or an infinity
// makes the scale NaN. Returns the number of an outlier, or -1.
int64_t round_block(const float *values, int8_t *codes, HalfSums *sums, float *scale) {
  float broken = 0;
  int64_t outlier = 0;
  for (int64_t i = 0; i < kBlock; i++) {
    if (__builtin_fabsf(values[i]) > __builtin_fabsf(values[outlier])) outlier = i;
    broken += values[i] * 0.0f;
  }
  float most = __builtin_fabsf(values[outlier]);
  const float rest = largest_but(values, outlier);
  if (rest >= kLeastRest && rest <= most * kMostRest)
    most = rest;
  else
    outlier = -1;
  float inverse = most > 0 ? 127.0f / most : 0.0f;
  sums[0] = sums[1] = {0, 0};
  for (int64_t i = 0; i < kBlock; i++) {
    const bool is_coded = broken == 0 && i != outlier;
    codes[i] = static_cast<int8_t>(__builtin_rintf(is_coded ? values[i] * inverse : 0.0f));
    HalfSums &half = sums[i / (kBlock / 2)];
    (i % 4 < 2 ? half.first : half.last) += codes[i];
  }
  *scale = most / 127.0f + broken;
  return outlier;
}

#endif


inline void load_block(const float *from, float *to) { memcpy(to, from, kBlock * sizeof *to); }

inline void load_block(const bfloat16 *from, float *to) {
#pragma omp simd
  for (int64_t i = 0; i < kBlock; i++) to[i] = load(from[i]);
}

// Widens the codes of a block to 16 bits.
inline void widen_block(const int8_t *codes, int16_t *to) {
  for (int64_t i = 0; i < kBlock; i += 4) {
    to[i] = codes[i];
    to[i + 1] = codes[i + 2];
    to[i + 2] = codes[i + 1];
    to[i + 3] = codes[i + 3];
  }
}

template <typename T>
void round_row(const tw_grouped &g, int64_t row, const Rows &to) {
  const T *from = static_cast<const T *>(g.rows) + row * g.inputs;
  const int64_t first = row / kRowsAtOnce * to.blocks, within = row % kRowsAtOnce;
  Outlier *const outliers = to.outliers + row * to.blocks, *next = outliers;
  for (int64_t block = 0; block < to.blocks; block++) {
    const int64_t at = (first + block) * kRowsAtOnce + within;
    float values[kBlock];
    HalfSums halves[2];
    load_block(from + block * kBlock, values);
    int8_t *codes = to.codes + at * kBlock;
    const int64_t outlier = round_block(values, codes, halves, to.scales + at);
    if (to.wide) widen_block(codes, to.wide + at * kBlock);
    if (outlier >= 0)
      *next++ = {static_cast<int32_t>(block * kBlock + outlier), static_cast<int32_t>(row),
                 values[outlier]};
    const HalfSums whole{halves[0].first + halves[1].first, halves[0].last + halves[1].last};
    float *sums = to.sums + (first + block) * to.parts * kRowsAtOnce + within;
    for (int part = 0; part < to.parts; part++) {
      const HalfSums &each = to.parts == 1 ? whole : halves[part];
      sums[part * kRowsAtOnce] = to.scales[at] * static_cast<float>(each.first + each.last);
    }
    int32_t *starts = to.starts + (first + block) * to.runs * kRowsAtOnce + within;
    for (int run = 0; run < to.runs; run++)
      starts[run * kRowsAtOnce] = start_of(to.runs == 1 ? whole : halves[run], to.zero);
  }
  to.counts[row] = static_cast<int32_t>(next - outliers);
}

// Rounds all rows of a product. The result is valid until the thread's next call.
inline Rows round_rows(const tw_grouped &g) {
  static thread_local Buffer memory[7];
  Rows rows;
  rows.blocks = g.inputs / kBlock;
  rows.parts = parts_of(g);
  rows.runs = runs_of(g);
  rows.zero = zero_of(coding_of(g));
  const int64_t slots = divide_up(g.num_rows, kRowsAtOnce) * kRowsAtOnce, count = slots * rows.blocks;
  rows.codes = static_cast<int8_t *>(memory[0].reserve(count * kBlock));
  const bool is_wide = kSixteenBits && has_sign(coding_of(g)) && g.num_rows > kRowsAtOnce;
  rows.wide = is_wide ? static_cast<int16_t *>(memory[1].reserve(count * kBlock * 2)) : nullptr;
  rows.scales = static_cast<float *>(memory[2].reserve(count * 4));
  rows.sums = static_cast<float *>(memory[3].reserve(count * rows.parts * 4));
  rows.starts = static_cast<int32_t *>(memory[4].reserve(count * rows.runs * 4));
  rows.outliers =
      static_cast<Outlier *>(memory[5].reserve(count * static_cast<int64_t>(sizeof(Outlier))));
  rows.counts = static_cast<int32_t *>(memory[6].reserve(slots * 4));
  parallel_for(slots / kRowsAtOnce, [&](int64_t item) {
    const int64_t end = minimum((item + 1) * kRowsAtOnce, g.num_rows);
    for (int64_t row = item * kRowsAtOnce; row < end; row++)
      (g.dtype == TW_FLOAT32 ? round_row<float> : round_row<bfloat16>)(g, row, rows);
  });
  return rows;
}

// A block of four rows.
struct RowBlock {
  const int8_t *codes;
  const int16_t *wide;
  const float *scales, *sums;
  const int32_t *starts;

  RowBlock(const Rows &rows, int64_t tile, int64_t block) {
    const int64_t at = (tile * rows.blocks + block) * kRowsAtOnce;
    codes = rows.codes + at * kBlock;
    wide = rows.wide ? rows.wide + at * kBlock : nullptr;
    scales = rows.scales + at;
    sums = rows.sums + at * rows.parts;
    starts = rows.starts + at * rows.runs;
  }

  template <typename Form>
  void next() {
    codes += kRowsAtOnce * kBlock;
    if (Form::kIsWide) wide += kRowsAtOnce * kBlock;
    scales += kRowsAtOnce;
    sums += kRowsAtOnce * Form::kParts;
    starts += kRowsAtOnce * Form::kRuns;
  }
};

}  // namespace
