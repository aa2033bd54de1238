// Products with weights in groups of 4-, 6- or 8-bit codes. Codes of 4 bits may be indices into a
// table of 16 values. Rows are rounded to 8 bits on the way in, so that a product of codes is one
// of bytes. Outliers' products are added to it.
//
// Vectors have 256 bits on every x86 processor, and hold 8 neighbouring outputs: a strip.
#include "grouped.h"

#include <string.h>

#if defined(TW_X86_64)
#include <immintrin.h>
#endif

#include "buffer.h"
#include "exponential.h"
#include "grouped_layout.h"
#include "outliers.h"
#include "threads.h"

namespace {

constexpr int64_t kRowsAtOnce = 4;
constexpr int64_t kStrips = 2;         // strips that are multiplied at once
constexpr int64_t kLine = 64;          // bytes of a cache line
constexpr int64_t kAhead = 2048;       // bytes of weights between those multiplied and prefetched
constexpr int64_t kRowsInCache = 64;  // rows whose codes stay in L2 while strips pass

inline float load_bfloat16(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(value != value ? (bits >> 16) | 0x40 : rounded);
}

// Rows as codes of 8 bits.
struct Rows {
  int8_t *codes;  // [rows, inputs], -127 to 127
  float *scales;  // [rows, inputs / 32]
  float *sums;    // [rows, groups] of the rounded values in each group of weights
  Outlier *outliers;  // [rows, inputs / 32], of which the first are set; their codes are 0
  int32_t *counts;    // [rows] of outliers
};

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

// Rounds 32 values to codes of one scale, and writes the sums of each 16 codes. A NaN or an infinity
// makes the scale NaN. Returns the number of an outlier, or -1.
inline int64_t round_block(const float *values, int8_t *codes, int32_t *sums, float *scale) {
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
  alignas(32) int32_t fours[8];
  _mm256_store_si256(reinterpret_cast<__m256i *>(fours),
                     _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  for (int i = 0; i < 2; i++)
    sums[i] = fours[4 * i] + fours[4 * i + 1] + fours[4 * i + 2] + fours[4 * i + 3];
  *scale = most / 127.0f + total(broken);
  return outlier;
}

#else

// Rounds 32 values to codes of one scale, and writes the sums of each 16 codes. A NaN or an infinity
// makes the scale NaN. Returns the number of an outlier, or -1.
int64_t round_block(const float *values, int8_t *codes, int32_t *sums, float *scale) {
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
  sums[0] = sums[1] = 0;
  for (int64_t i = 0; i < kBlock; i++) {
    const bool is_coded = broken == 0 && i != outlier;
    codes[i] = static_cast<int8_t>(__builtin_rintf(is_coded ? values[i] * inverse : 0.0f));
    sums[i / (kBlock / 2)] += codes[i];
  }
  *scale = most / 127.0f + broken;
  return outlier;
}

#endif

inline void load_block(const float *from, float *to) { memcpy(to, from, kBlock * sizeof *to); }

inline void load_block(const uint16_t *from, float *to) {
#pragma omp simd
  for (int64_t i = 0; i < kBlock; i++) to[i] = load_bfloat16(from[i]);
}

template <typename T>
void round_row(const tw_grouped &g, int64_t row, const Rows &to) {
  int64_t blocks = g.inputs / kBlock, left = g.group;  // inputs of the present group
  const T *from = static_cast<const T *>(g.rows) + row * g.inputs;
  int8_t *codes = to.codes + row * g.inputs;
  float *scales = to.scales + row * blocks, *sums = to.sums + row * (g.inputs / g.group);
  Outlier *next = to.outliers + row * blocks;
  memset(sums, 0, sizeof(float) * static_cast<size_t>(g.inputs / g.group));
  for (int64_t b = 0; b < blocks; b++) {
    float values[kBlock];
    int32_t halves[2];
    load_block(from + b * kBlock, values);
    const int64_t outlier = round_block(values, codes + b * kBlock, halves, scales + b);
    if (outlier >= 0)
      *next++ = {static_cast<int32_t>(b * kBlock + outlier), static_cast<int32_t>(row),
                 values[outlier]};
    if (g.group < kBlock) {
      for (int64_t half = 0; half < 2; half++)
        sums[2 * b + half] = scales[b] * static_cast<float>(halves[half]);
      continue;
    }
    *sums += scales[b] * static_cast<float>(halves[0] + halves[1]);
    left -= kBlock;
    if (left) continue;
    left = g.group;
    sums++;
  }
  to.counts[row] = static_cast<int32_t>(next - (to.outliers + row * blocks));
}

#if defined(__AVX2__)

using Vector = __m256;  // of a strip's outputs

inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector broadcast(float value) { return _mm256_set1_ps(value); }
inline Vector fused(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector less(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
inline void store(float *to, Vector from) { _mm256_storeu_ps(to, from); }

inline Vector times(Vector a, Vector b) { return _mm256_mul_ps(a, b); }

inline Vector load_floats(const uint8_t *from) {
  return _mm256_loadu_ps(reinterpret_cast<const float *>(from));
}
inline Vector load_halves(const uint8_t *from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
inline Vector load_levels(const uint8_t *from) {
  __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

inline Vector load_exponents(const uint8_t *from) {
  __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23));
}

inline __m256i load_codes(const uint8_t *from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
}

// Copies four codes of a row to every lane.
inline __m256i four(const int8_t *codes) {
  int32_t bits;
  memcpy(&bits, codes, sizeof bits);
  return _mm256_set1_epi32(bits);
}

// Adds to each lane of `sum` the products of its four unsigned and four signed bytes. Those of two
// neighbours fit 16 bits.
inline __m256i add_products(__m256i sum, __m256i bytes, __m256i signed_bytes) {
#if defined(__AVX512VNNI__)
  return _mm256_dpbusd_epi32(sum, bytes, signed_bytes);
#else
  __m256i pairs = _mm256_maddubs_epi16(bytes, signed_bytes);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

// Has the compiler add here: it would compute all products before it adds them, and spill them.
inline void in_order(__m256i &sum) { asm volatile("" : "+x"(sum)); }

// Multiplies kRows rows by a unit of the codes of two strips: 4 bits, kUnit inputs. A row's codes are
// loaded once for both.
template <int kRows, int kUnit>
inline void multiply_nibbles(const uint8_t *const *codes, const int8_t *rows, int64_t stride,
                             Vector (*products)[kRows]) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i sums[kStrips][kRows];
#pragma GCC unroll 8
  for (int j = 0; j < kUnit / 8; j++) {
    __m256i both[kStrips];
#pragma GCC unroll 8
    for (int s = 0; s < kStrips; s++) both[s] = load_codes(codes[s] + 32 * j);
#pragma GCC unroll 8
    for (int half = 0; half < 2; half++) {
      const int k = 2 * j + half;
      __m256i weights[kStrips];
#pragma GCC unroll 8
      for (int s = 0; s < kStrips; s++)
        weights[s] = _mm256_and_si256(half ? _mm256_srli_epi16(both[s], 4) : both[s], low);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const __m256i row = four(rows + r * stride + 4 * k);
#pragma GCC unroll 8
        for (int s = 0; s < kStrips; s++) {
#if defined(__AVX512VNNI__)
          sums[s][r] = add_products(k ? sums[s][r] : _mm256_setzero_si256(), weights[s], row);
#else
          // Eight pairs of products of 15 and 127 fit 16 bits.
          __m256i pairs = _mm256_maddubs_epi16(weights[s], row);
          sums[s][r] = k ? _mm256_add_epi16(sums[s][r], pairs) : pairs;
#endif
          in_order(sums[s][r]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
#if !defined(__AVX512VNNI__)
      sums[s][r] = _mm256_madd_epi16(sums[s][r], _mm256_set1_epi16(1));
#endif
      products[s][r] = _mm256_cvtepi32_ps(sums[s][r]);
    }
}

// Returns four inputs of 8 outputs in a unit of 6-bit codes. k: which of the four.
inline __m256i load_sixes(const uint8_t *unit, int k) {
  const __m256i four_bits = load_codes(unit + k / 2 * 32), two_bits = load_codes(unit + 64);
  const __m256i raised = k == 0   ? _mm256_slli_epi16(two_bits, 4)
                         : k == 1 ? _mm256_slli_epi16(two_bits, 2)
                         : k == 2 ? two_bits
                                  : _mm256_srli_epi16(two_bits, 2);
  const __m256i lowered = k % 2 ? _mm256_srli_epi16(four_bits, 4) : four_bits;
  return _mm256_or_si256(_mm256_and_si256(lowered, _mm256_set1_epi8(15)),
                         _mm256_and_si256(raised, _mm256_set1_epi8(48)));
}

// The same for codes of 6 bits.
template <int kRows, int kUnit>
inline void multiply_sixes(const uint8_t *const *codes, const int8_t *rows, int64_t stride,
                           Vector (*products)[kRows]) {
  __m256i sums[kStrips][kRows];
#pragma GCC unroll 8
  for (int k = 0; k < kUnit / 4; k += 2) {
    __m256i weights[kStrips][2];
#pragma GCC unroll 8
    for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 8
      for (int i = 0; i < 2; i++) weights[s][i] = load_sixes(codes[s] + k / 4 * kSixes, k % 4 + i);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const __m256i first = four(rows + r * stride + 4 * k);
      const __m256i second = four(rows + r * stride + 4 * k + 4);
#pragma GCC unroll 8
      for (int s = 0; s < kStrips; s++) {
#if defined(__AVX512VNNI__)
        __m256i sum = add_products(k ? sums[s][r] : _mm256_setzero_si256(), weights[s][0], first);
        sums[s][r] = add_products(sum, weights[s][1], second);
#else
        // Two pairs of products of 63 and 127 fit 16 bits.
        __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(weights[s][0], first),
                                         _mm256_maddubs_epi16(weights[s][1], second));
        pairs = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        sums[s][r] = k ? _mm256_add_epi32(sums[s][r], pairs) : pairs;
#endif
        in_order(sums[s][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) products[s][r] = _mm256_cvtepi32_ps(sums[s][r]);
}

// The same for weights of 8 bits with a sign. load(unit, k): returns four inputs of 8 outputs.
template <int kRows, int kUnit, typename Load>
inline void multiply_signed(const uint8_t *const *codes, const int8_t *rows, int64_t stride,
                            Vector (*products)[kRows], const Load &load) {
  __m256i sums[kStrips][kRows];
#pragma GCC unroll 8
  for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) sums[s][r] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int k = 0; k < kUnit / 4; k++) {
    __m256i weights[kStrips], magnitudes[kStrips];
#pragma GCC unroll 8
    for (int s = 0; s < kStrips; s++) {
      weights[s] = load(codes[s], k);
      magnitudes[s] = _mm256_abs_epi8(weights[s]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const __m256i row = four(rows + r * stride + 4 * k);
#pragma GCC unroll 8
      for (int s = 0; s < kStrips; s++) {
        sums[s][r] = add_products(sums[s][r], magnitudes[s], _mm256_sign_epi8(row, weights[s]));
        in_order(sums[s][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) products[s][r] = _mm256_cvtepi32_ps(sums[s][r]);
}

template <int kRows, int kUnit>
inline void multiply_bytes(const uint8_t *const *codes, const int8_t *rows, int64_t stride,
                           Vector (*products)[kRows]) {
  multiply_signed<kRows, kUnit>(codes, rows, stride, products, [](const uint8_t *unit, int k) {
    return load_codes(unit + 32 * k);
  });
}

template <int kRows, int kUnit>
inline void multiply_values(const uint8_t *const *codes, const int8_t *rows, int64_t stride,
                            Vector (*products)[kRows], const int8_t *values) {
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(values)));
  multiply_signed<kRows, kUnit>(codes, rows, stride, products, [&](const uint8_t *unit, int k) {
    const __m256i both = load_codes(unit + k / 2 * 32);
    const __m256i four_bits = k % 2 ? _mm256_srli_epi16(both, 4) : both;
    return _mm256_shuffle_epi8(table, _mm256_and_si256(four_bits, _mm256_set1_epi8(15)));
  });
}

// Returns the codes of an input of 8 outputs as numbers. codes: of its group.
template <int kCoding>
inline Vector load_input(const tw_grouped &g, const uint8_t *codes, int64_t input) {
  const int64_t four = input / 4;
  __m256i bytes;
  if (kCoding == 8) {
    bytes = load_codes(codes + four * 32);
  } else if (kCoding == 6) {
    bytes = load_sixes(codes + input / 16 * kSixes, static_cast<int>(four % 4));
  } else {
    bytes = load_codes(codes + four / 2 * 32);
    bytes = _mm256_and_si256(four % 2 ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
    if (kCoding == kValues) {
      const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i *>(g.values));
      bytes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), bytes);
    }
  }
  const __m128i shift = _mm_cvtsi64_si128((3 - input % 4) * 8);
  bytes = _mm256_sll_epi32(bytes, shift);
  constexpr bool kSigned = kCoding == 8 || kCoding == kValues;
  return _mm256_cvtepi32_ps(kSigned ? _mm256_srai_epi32(bytes, 24) : _mm256_srli_epi32(bytes, 24));
}

inline Vector load(const float *from) { return _mm256_loadu_ps(from); }

#else  // any processor

struct Vector {
  float lanes[kStrip];
};

inline Vector broadcast(float value) {
  Vector v;
  for (float &lane : v.lanes) lane = value;
  return v;
}
inline Vector zero() { return broadcast(0); }
inline Vector fused(Vector a, Vector b, Vector c) {
  for (int64_t i = 0; i < kStrip; i++) c.lanes[i] += a.lanes[i] * b.lanes[i];
  return c;
}
inline Vector less(Vector a, Vector b) {
  for (int64_t i = 0; i < kStrip; i++) a.lanes[i] -= b.lanes[i];
  return a;
}
inline void store(float *to, Vector from) { memcpy(to, from.lanes, sizeof from.lanes); }

inline Vector times(Vector a, Vector b) {
  for (int64_t i = 0; i < kStrip; i++) a.lanes[i] *= b.lanes[i];
  return a;
}

inline Vector load_floats(const uint8_t *from) {
  Vector v;
  memcpy(v.lanes, from, sizeof v.lanes);
  return v;
}
inline Vector load_halves(const uint8_t *from) {
  uint16_t halves[kStrip];
  memcpy(halves, from, sizeof halves);
  Vector v;
  for (int64_t i = 0; i < kStrip; i++) v.lanes[i] = half_to_float(halves[i]);
  return v;
}
inline Vector load_levels(const uint8_t *from) {
  Vector v;
  for (int64_t i = 0; i < kStrip; i++) v.lanes[i] = static_cast<int8_t>(from[i]);
  return v;
}

inline Vector load_exponents(const uint8_t *from) {
  uint32_t bits[kStrip];
  for (int64_t i = 0; i < kStrip; i++) bits[i] = static_cast<uint32_t>(from[i]) << 23;
  Vector v;
  memcpy(v.lanes, bits, sizeof v.lanes);
  return v;
}

// code: returns the code of a lane and an input in a unit.
template <int kRows, int kUnit, typename Code>
inline void multiply_each(const uint8_t *const *codes, const int8_t *rows, int64_t stride,
                          Vector (*products)[kRows], Code code) {
  for (int s = 0; s < kStrips; s++)
    for (int r = 0; r < kRows; r++)
      for (int64_t lane = 0; lane < kStrip; lane++) {
        int32_t sum = 0;
        for (int64_t i = 0; i < kUnit; i++) sum += code(codes[s], lane, i) * rows[r * stride + i];
        products[s][r].lanes[lane] = static_cast<float>(sum);
      }
}

template <int kRows, int kUnit>
inline void multiply_nibbles(const uint8_t *const *codes, const int8_t *rows, int64_t stride,
                             Vector (*products)[kRows]) {
  multiply_each<kRows, kUnit>(codes, rows, stride, products, nibble);
}

template <int kRows, int kUnit>
inline void multiply_sixes(const uint8_t *const *codes, const int8_t *rows, int64_t stride,
                           Vector (*products)[kRows]) {
  multiply_each<kRows, kUnit>(codes, rows, stride, products, six);
}

template <int kRows, int kUnit>
inline void multiply_bytes(const uint8_t *const *codes, const int8_t *rows, int64_t stride,
                           Vector (*products)[kRows]) {
  multiply_each<kRows, kUnit>(codes, rows, stride, products,
                              [](const uint8_t *unit, int64_t lane, int64_t input) -> int32_t {
                                return static_cast<int8_t>(unit[byte_at(lane, input)]);
                              });
}

template <int kRows, int kUnit>
inline void multiply_values(const uint8_t *const *codes, const int8_t *rows, int64_t stride,
                            Vector (*products)[kRows], const int8_t *values) {
  multiply_each<kRows, kUnit>(codes, rows, stride, products,
                              [values](const uint8_t *unit, int64_t lane, int64_t input) -> int32_t {
                                return values[nibble(unit, lane, input)];
                              });
}

// Returns the codes of an input of 8 outputs as numbers. codes: of its group.
template <int kCoding>
inline Vector load_input(const tw_grouped &g, const uint8_t *codes, int64_t input) {
  Vector v;
  for (int64_t lane = 0; lane < kStrip; lane++) {
    const int32_t code = kCoding == 8 ? static_cast<int8_t>(codes[byte_at(lane, input)])
                         : kCoding == 6 ? six(codes, lane, input)
                                        : nibble(codes, lane, input);
    v.lanes[lane] = static_cast<float>(kCoding == kValues ? g.values[code] : code);
  }
  return v;
}

inline Vector load(const float *from) {
  Vector v;
  memcpy(v.lanes, from, sizeof v.lanes);
  return v;
}

#endif

// Loads the scales or offsets of a strip's group. factors: those of its 256 inputs, for levels.
template <int kNumbers>
inline Vector load_numbers(const uint8_t *from, const uint8_t *factors) {
  if (kNumbers == TW_LEVELS) return times(load_halves(factors), load_levels(from));
  if (kNumbers == TW_EXPONENTS) return load_exponents(from);
  return kNumbers == TW_HALVES ? load_halves(from) : load_floats(from);
}

// Adds the products of a row's outliers and a strip. out: [kStrip].
template <int kCoding, int kNumbers, bool kOffsets>
void add_outliers(const tw_grouped &g, const uint8_t *packed, const Rows &rows, int64_t row,
                  float *out) {
  constexpr int64_t kEach = kStrip * bytes_each(kNumbers), kKinds = kOffsets ? 2 : 1;
  constexpr bool kSigned = kCoding == 8 || kCoding == kValues;
  const int64_t group_bytes = kEach * kKinds + g.group * kStrip * bits_of(kCoding) / 8;
  const Outlier *at = rows.outliers + row * (g.inputs / kBlock);
  Vector sum = load(out);
  for (const Outlier *last = at + rows.counts[row]; at < last; at++) {
    const int64_t group = at->input / g.group, super = at->input / kSuper;
    const uint8_t *factors = packed + super * (kSuper / g.group * group_bytes + factor_bytes(g));
    const uint8_t *numbers = packed + group * group_bytes + (super + 1) * factor_bytes(g);
    Vector code = load_input<kCoding>(g, numbers + kEach * kKinds, at->input % g.group);
    if (!kSigned && !kOffsets) code = less(code, broadcast(zero_of(kCoding)));
    Vector weight = times(code, load_numbers<kNumbers>(numbers, factors));
    if (kOffsets)
      weight = fused(broadcast(1), load_numbers<kNumbers>(numbers + kEach, factors + kStrip * 2),
                     weight);
    sum = fused(weight, broadcast(at->value), sum);
  }
  store(out, sum);
}

// Multiplies kRows rows by two strips, `strip_bytes` apart. out: [kStrips][kRows][kStrip].
template <int kRows, int kCoding, int kUnit, int kNumbers, bool kOffsets>
void multiply_strips(const tw_grouped &g, const uint8_t *packed, int64_t apart, const Rows &rows,
                     int64_t first, float *out) {
  constexpr int64_t kCodes = kUnit * kStrip * bits_of(kCoding) / 8;
  constexpr bool kSigned = kCoding == 8 || kCoding == kValues;
  const int64_t blocks = g.inputs / kBlock, groups = g.inputs / g.group, units = g.group / kUnit;
  constexpr int64_t kEach = kStrip * bytes_each(kNumbers);
  constexpr int kKinds = kOffsets ? 2 : 1;
  const int8_t *codes = rows.codes + first * g.inputs;
  const float *scales = rows.scales + first * blocks, *sums = rows.sums + first * groups;
  Vector totals[kStrips][kRows];
#pragma GCC unroll 8
  for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) totals[s][r] = zero();
  const uint8_t *at[kStrips], *factors[kStrips];
#pragma GCC unroll 8
  for (int s = 0; s < kStrips; s++) factors[s] = at[s] = packed + s * apart;
  for (int64_t group = 0; group < groups; group++) {
    if (kNumbers == TW_LEVELS && group * g.group % kSuper == 0) {
#pragma GCC unroll 8
      for (int s = 0; s < kStrips; s++) {
        factors[s] = at[s];
        at[s] += kStrip * 2 * kKinds;
      }
    }
    const uint8_t *const numbers[kStrips] = {at[0], at[1]};
#pragma GCC unroll 8
    for (int s = 0; s < kStrips; s++) at[s] += kEach * kKinds;
    Vector parts[kStrips][kRows];
#pragma GCC unroll 8
    for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) parts[s][r] = zero();
    for (int64_t unit = 0; unit < units; unit++) {
      const int64_t input = group * g.group + unit * kUnit;
#pragma GCC unroll 8
      for (int s = 0; s < kStrips; s++)
        for (int64_t line = 0; line < kCodes; line += kLine)
          __builtin_prefetch(at[s] + kAhead + line);
      Vector products[kStrips][kRows];
      if (kCoding == 4)
        multiply_nibbles<kRows, kUnit>(at, codes + input, g.inputs, products);
      else if (kCoding == 6)
        multiply_sixes<kRows, kUnit>(at, codes + input, g.inputs, products);
      else if (kCoding == kValues)
        multiply_values<kRows, kUnit>(at, codes + input, g.inputs, products, g.values);
      else
        multiply_bytes<kRows, kUnit>(at, codes + input, g.inputs, products);
#pragma GCC unroll 8
      for (int s = 0; s < kStrips; s++) at[s] += kCodes;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const Vector scale = broadcast(scales[r * blocks + input / kBlock]);
#pragma GCC unroll 8
        for (int s = 0; s < kStrips; s++)
          parts[s][r] = fused(products[s][r], scale, parts[s][r]);
      }
    }
#pragma GCC unroll 8
    for (int s = 0; s < kStrips; s++) {
      const Vector scale = load_numbers<kNumbers>(numbers[s], factors[s]);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const float sum = sums[r * groups + group];
        if (!kSigned && !kOffsets)
          parts[s][r] = less(parts[s][r], broadcast(zero_of(kCoding) * sum));
        totals[s][r] = fused(scale, parts[s][r], totals[s][r]);
        if (kOffsets)
          totals[s][r] = fused(load_numbers<kNumbers>(numbers[s] + kEach, factors[s] + kStrip * 2),
                               broadcast(sum), totals[s][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      float *const to = out + (s * kRows + r) * kStrip;
      store(to, totals[s][r]);
      add_outliers<kCoding, kNumbers, kOffsets>(g, packed + s * apart, rows, first + r, to);
    }
}

using MultiplyStrips = decltype(&multiply_strips<1, 4, 32, TW_FLOATS, false>);

template <int kRows, int kCoding, int kUnit, int kNumbers>
MultiplyStrips choose_offsets(const tw_grouped &g) {
  return g.has_offsets ? multiply_strips<kRows, kCoding, kUnit, kNumbers, kCoding != kValues>
                       : multiply_strips<kRows, kCoding, kUnit, kNumbers, false>;
}

template <int kRows, int kCoding, int kUnit>
MultiplyStrips choose_numbers(const tw_grouped &g) {
  constexpr int kExponents = kCoding == kValues ? TW_EXPONENTS : TW_FLOATS;
  if (g.numbers == TW_EXPONENTS) return choose_offsets<kRows, kCoding, kUnit, kExponents>(g);
  if (g.numbers == TW_LEVELS) return choose_offsets<kRows, kCoding, kUnit, TW_LEVELS>(g);
  return g.numbers == TW_HALVES ? choose_offsets<kRows, kCoding, kUnit, TW_HALVES>(g)
                                : choose_offsets<kRows, kCoding, kUnit, TW_FLOATS>(g);
}

template <int kRows, int kCoding>
MultiplyStrips choose_unit(const tw_grouped &g) {
  return g.group == kBlock / 2 ? choose_numbers<kRows, kCoding, kBlock / 2>(g)
                               : choose_numbers<kRows, kCoding, kBlock>(g);
}

template <int kRows>
MultiplyStrips choose(const tw_grouped &g) {
  if (g.has_values) return choose_unit<kRows, kValues>(g);
  if (g.bits == 4) return choose_unit<kRows, 4>(g);
  return g.bits == 6 ? choose_unit<kRows, 6>(g) : choose_unit<kRows, 8>(g);
}

// Returns the packed weights of some strips; mapped ones until the thread's next call.
const uint8_t *strips_of(const tw_grouped &g, int64_t first, int64_t count) {
  static thread_local Buffer memory;
  const int64_t bytes = strip_bytes(g);
  if (!g.mapped) return static_cast<const uint8_t *>(g.packed) + (g.first_strip + first) * bytes;
  auto *packed = static_cast<uint8_t *>(memory.reserve(count * bytes));
  tw_pack_mapped(&g, first, count, packed);
  return packed;
}

// Writes the outputs of a strip and some rows.
void write(const tw_grouped &g, const float *strip, int64_t first_row, int64_t num_rows,
           int64_t output) {
  int64_t count = minimum(kStrip, g.outputs - output);
  for (int64_t r = 0; r < num_rows; r++) {
    int64_t at = (first_row + r) * g.out_stride + output;
    for (int64_t i = 0; i < count; i++) {
      float value = strip[r * kStrip + i] + (g.bias ? g.bias[output + i] : 0.0f);
      if (g.out_dtype == TW_FLOAT32) {
        float *to = static_cast<float *>(g.out) + at + i;
        *to = g.adds ? *to + value : value;
      } else {
        uint16_t *to = static_cast<uint16_t *>(g.out) + at + i;
        *to = to_bfloat16(g.adds ? load_bfloat16(*to) + value : value);
      }
    }
  }
}

}  // namespace

void TW_GROUPED(const tw_grouped *call) {
  const tw_grouped g = *call;
  static thread_local Buffer memory[5];
  Rows rows;
  int64_t blocks = g.inputs / kBlock, groups = g.inputs / g.group;
  rows.codes = static_cast<int8_t *>(memory[0].reserve(g.num_rows * g.inputs));
  rows.scales = static_cast<float *>(memory[1].reserve(g.num_rows * blocks * 4));
  rows.sums = static_cast<float *>(memory[2].reserve(g.num_rows * groups * 4));
  const auto outlier_bytes = static_cast<int64_t>(sizeof(Outlier));
  rows.outliers =
      static_cast<Outlier *>(memory[3].reserve(g.num_rows * blocks * outlier_bytes));
  rows.counts = static_cast<int32_t *>(memory[4].reserve(g.num_rows * 4));
  parallel_for((g.num_rows + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t item) {
    int64_t end = minimum((item + 1) * kRowsAtOnce, g.num_rows);
    for (int64_t row = item * kRowsAtOnce; row < end; row++)
      (g.dtype == TW_FLOAT32 ? round_row<float> : round_row<uint16_t>)(g, row, rows);
  });
  const MultiplyStrips by_rows[] = {choose<1>(g), choose<2>(g), choose<3>(g), choose<4>(g)};
  int64_t strips = (g.outputs + kStrip - 1) / kStrip, bytes = strip_bytes(g);
  int64_t pairs = (strips + kStrips - 1) / kStrips;
  int64_t at_once = kStrips * maximum(pairs / (8 * num_threads()), static_cast<int64_t>(1));
  int64_t ranges = (strips + at_once - 1) / at_once;
  int64_t row_blocks = (g.num_rows + kRowsInCache - 1) / kRowsInCache;
  parallel_for(ranges * row_blocks, [&](int64_t item) {
    int64_t first = item / ranges * kRowsInCache;
    int64_t last = minimum(first + kRowsInCache, g.num_rows);
    int64_t begin = item % ranges * at_once, end = minimum(begin + at_once, strips);
    for (int64_t strip = begin; strip < end; strip += kStrips) {
      const uint8_t *packed = strips_of(g, strip, minimum(kStrips, end - strip));
      // The last strip may be alone: it is multiplied twice.
      const int64_t apart = strip + 1 < end ? bytes : 0;
      for (int64_t row = first; row < last; row += kRowsAtOnce) {
        float out[kStrips * kRowsAtOnce * kStrip];
        int64_t count = minimum(kRowsAtOnce, last - row);
        by_rows[count - 1](g, packed, apart, rows, row, out);
        write(g, out, row, count, strip * kStrip);
        if (apart) write(g, out + count * kStrip, row, count, (strip + 1) * kStrip);
      }
    }
  });
}
