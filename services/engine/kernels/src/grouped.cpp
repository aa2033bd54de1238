// Products with weights in groups of 4- or 8-bit codes. Rows are rounded to 8 bits on the way in,
// so that a product of codes is one of bytes.
//
// Vectors have 256 bits on every x86 processor, and hold 8 neighbouring outputs: a strip.
#include "grouped.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "buffer.h"
#include "exponential.h"
#include "grouped_layout.h"
#include "threads.h"

namespace {

constexpr int64_t kRowsAtOnce = 4;
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
};

// Rounds 32 values to codes of one scale. A NaN or an infinity makes the scale NaN.
float round_block(const float *values, int8_t *codes) {
  float largest = 0, broken = 0;
#pragma omp simd reduction(max : largest) reduction(+ : broken)
  for (int64_t i = 0; i < kBlock; i++) {
    largest = maximum(largest, __builtin_fabsf(values[i]));
    broken += values[i] * 0.0f;
  }
  float inverse = largest > 0 ? 127.0f / largest : 0.0f;
#pragma omp simd
  for (int64_t i = 0; i < kBlock; i++) {
    // Adding 1.5 * 2^23 rounds to the nearest integer, which the low bits then hold.
    float shifted = values[i] * inverse + 12582912.0f;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    codes[i] = static_cast<int8_t>(bits);
  }
  return largest / 127.0f + broken;
}

void round_row(const tw_grouped &g, int64_t row, const Rows &to) {
  int64_t blocks = g.inputs / kBlock, unit = minimum(g.group, kBlock);
  int8_t *codes = to.codes + row * g.inputs;
  float *scales = to.scales + row * blocks, *sums = to.sums + row * (g.inputs / g.group);
  memset(sums, 0, sizeof(float) * static_cast<size_t>(g.inputs / g.group));
  for (int64_t b = 0; b < blocks; b++) {
    float values[kBlock];
    int64_t at = row * g.inputs + b * kBlock;
    for (int64_t i = 0; i < kBlock; i++)
      values[i] = g.dtype == TW_FLOAT32
                      ? static_cast<const float *>(g.rows)[at + i]
                      : load_bfloat16(static_cast<const uint16_t *>(g.rows)[at + i]);
    scales[b] = round_block(values, codes + b * kBlock);
    for (int64_t first = 0; first < kBlock; first += unit) {
      int32_t sum = 0;
      for (int64_t i = 0; i < unit; i++) sum += codes[b * kBlock + first + i];
      sums[(b * kBlock + first) / g.group] += scales[b] * static_cast<float>(sum);
    }
  }
}

#if defined(__AVX2__)

using Vector = __m256;  // of a strip's outputs

inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector broadcast(float value) { return _mm256_set1_ps(value); }
inline Vector fused(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector less(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
inline void store(float *to, Vector from) { _mm256_storeu_ps(to, from); }

template <bool kHalf>
inline Vector load_scales(const uint8_t *from) {
  if (kHalf)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
  return _mm256_loadu_ps(reinterpret_cast<const float *>(from));
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

// Multiplies kRows rows by a unit of a strip's codes: 4 bits, 32 inputs.
template <int kRows>
inline void multiply_nibbles(const uint8_t *codes, const int8_t *rows, int64_t stride,
                             Vector *products) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i weights[8];
  for (int j = 0; j < 4; j++) {
    __m256i both = load_codes(codes + 32 * j);
    weights[2 * j] = _mm256_and_si256(both, low);
    weights[2 * j + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
  }
  for (int r = 0; r < kRows; r++) {
    const int8_t *row = rows + r * stride;
#if defined(__AVX512VNNI__)
    __m256i sum = _mm256_setzero_si256();
    for (int k = 0; k < 8; k++) sum = add_products(sum, weights[k], four(row + 4 * k));
#else
    // Eight pairs of products of 15 and 127 fit 16 bits.
    __m256i pairs = _mm256_maddubs_epi16(weights[0], four(row));
    for (int k = 1; k < 8; k++)
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(weights[k], four(row + 4 * k)));
    __m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
    products[r] = _mm256_cvtepi32_ps(sum);
  }
}

// The same for codes of 8 bits with a sign, kUnit inputs.
template <int kRows, int kUnit>
inline void multiply_bytes(const uint8_t *codes, const int8_t *rows, int64_t stride,
                           Vector *products) {
  __m256i sums[kRows];
  for (int r = 0; r < kRows; r++) sums[r] = _mm256_setzero_si256();
  for (int k = 0; k < kUnit / 4; k++) {
    __m256i weights = load_codes(codes + 32 * k), magnitudes = _mm256_abs_epi8(weights);
    for (int r = 0; r < kRows; r++) {
      __m256i row = _mm256_sign_epi8(four(rows + r * stride + 4 * k), weights);
      sums[r] = add_products(sums[r], magnitudes, row);
    }
  }
  for (int r = 0; r < kRows; r++) products[r] = _mm256_cvtepi32_ps(sums[r]);
}

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

template <bool kHalf>
inline Vector load_scales(const uint8_t *from) {
  Vector v;
  for (int64_t i = 0; i < kStrip; i++) {
    if (kHalf)
      v.lanes[i] = half_to_float(reinterpret_cast<const uint16_t *>(from)[i]);
    else
      v.lanes[i] = reinterpret_cast<const float *>(from)[i];
  }
  return v;
}

template <int kRows>
inline void multiply_nibbles(const uint8_t *codes, const int8_t *rows, int64_t stride,
                             Vector *products) {
  for (int r = 0; r < kRows; r++)
    for (int64_t lane = 0; lane < kStrip; lane++) {
      int32_t sum = 0;
      for (int64_t i = 0; i < kBlock; i++)
        sum += nibble(codes, lane, i) * rows[r * stride + i];
      products[r].lanes[lane] = static_cast<float>(sum);
    }
}

template <int kRows, int kUnit>
inline void multiply_bytes(const uint8_t *codes, const int8_t *rows, int64_t stride,
                           Vector *products) {
  for (int r = 0; r < kRows; r++)
    for (int64_t lane = 0; lane < kStrip; lane++) {
      int32_t sum = 0;
      for (int64_t i = 0; i < kUnit; i++)
        sum += static_cast<int8_t>(codes[byte_at(lane, i)]) * rows[r * stride + i];
      products[r].lanes[lane] = static_cast<float>(sum);
    }
}

#endif

// Multiplies kRows rows by a strip.
template <int kRows, int kBits, int kUnit, bool kHalf, bool kOffsets>
void multiply_strip(const tw_grouped &g, const uint8_t *packed, const Rows &rows, int64_t first,
                    float *out) {
  constexpr int64_t kScales = kStrip * (kHalf ? 2 : 4), kCodes = kUnit * kStrip * kBits / 8;
  const int64_t blocks = g.inputs / kBlock, groups = g.inputs / g.group, units = g.group / kUnit;
  const int8_t *codes = rows.codes + first * g.inputs;
  const float *scales = rows.scales + first * blocks, *sums = rows.sums + first * groups;
  Vector totals[kRows];
  for (int r = 0; r < kRows; r++) totals[r] = zero();
  for (int64_t group = 0; group < groups; group++) {
    const Vector scale = load_scales<kHalf>(packed);
    packed += kScales;
    Vector offset = scale;
    if (kOffsets) {
      offset = load_scales<kHalf>(packed);
      packed += kScales;
    }
    Vector parts[kRows];
    for (int r = 0; r < kRows; r++) parts[r] = zero();
    for (int64_t unit = 0; unit < units; unit++) {
      const int64_t input = group * g.group + unit * kUnit;
      for (int64_t at = 0; at < kCodes; at += kLine)
        __builtin_prefetch(packed + kAhead + at);
      Vector products[kRows];
      if (kBits == 4)
        multiply_nibbles<kRows>(packed, codes + input, g.inputs, products);
      else
        multiply_bytes<kRows, kUnit>(packed, codes + input, g.inputs, products);
      packed += kCodes;
      for (int r = 0; r < kRows; r++)
        parts[r] = fused(products[r], broadcast(scales[r * blocks + input / kBlock]), parts[r]);
    }
    for (int r = 0; r < kRows; r++) {
      const float sum = sums[r * groups + group];
      if (kBits == 4 && !kOffsets) parts[r] = less(parts[r], broadcast(kZero * sum));
      totals[r] = fused(scale, parts[r], totals[r]);
      if (kOffsets) totals[r] = fused(offset, broadcast(sum), totals[r]);
    }
  }
  for (int r = 0; r < kRows; r++) store(out + r * kStrip, totals[r]);
}

using MultiplyStrip = decltype(&multiply_strip<1, 4, 32, false, false>);

template <int kRows, int kBits, int kUnit>
MultiplyStrip choose_scales(const tw_grouped &g) {
  if (g.has_halves)
    return g.has_offsets ? multiply_strip<kRows, kBits, kUnit, true, true>
                         : multiply_strip<kRows, kBits, kUnit, true, false>;
  return g.has_offsets ? multiply_strip<kRows, kBits, kUnit, false, true>
                       : multiply_strip<kRows, kBits, kUnit, false, false>;
}

template <int kRows>
MultiplyStrip choose(const tw_grouped &g) {
  if (g.bits == 4) return choose_scales<kRows, 4, 32>(g);
  return g.group == 16 ? choose_scales<kRows, 8, 16>(g) : choose_scales<kRows, 8, 32>(g);
}

// Writes the outputs of a strip and some rows.
void write(const tw_grouped &g, const float *strip, int64_t first_row, int64_t num_rows,
           int64_t output) {
  int64_t count = minimum(kStrip, g.outputs - output);
  for (int64_t r = 0; r < num_rows; r++) {
    int64_t at = (first_row + r) * g.outputs + output;
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
  static thread_local Buffer memory[3];
  Rows rows;
  int64_t blocks = g.inputs / kBlock, groups = g.inputs / g.group;
  rows.codes = static_cast<int8_t *>(memory[0].reserve(g.num_rows * g.inputs));
  rows.scales = static_cast<float *>(memory[1].reserve(g.num_rows * blocks * 4));
  rows.sums = static_cast<float *>(memory[2].reserve(g.num_rows * groups * 4));
  parallel_for((g.num_rows + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t item) {
    int64_t end = minimum((item + 1) * kRowsAtOnce, g.num_rows);
    for (int64_t row = item * kRowsAtOnce; row < end; row++) round_row(g, row, rows);
  });
  const MultiplyStrip by_rows[] = {choose<1>(g), choose<2>(g), choose<3>(g), choose<4>(g)};
  int64_t strips = (g.outputs + kStrip - 1) / kStrip, bytes = strip_bytes(g);
  int64_t at_once = maximum(strips / (8 * num_threads()), static_cast<int64_t>(1));
  int64_t ranges = (strips + at_once - 1) / at_once;
  int64_t row_blocks = (g.num_rows + kRowsInCache - 1) / kRowsInCache;
  parallel_for(ranges * row_blocks, [&](int64_t item) {
    int64_t first = item / ranges * kRowsInCache;
    int64_t last = minimum(first + kRowsInCache, g.num_rows);
    int64_t begin = item % ranges * at_once, end = minimum(begin + at_once, strips);
    for (int64_t strip = begin; strip < end; strip++) {
      const uint8_t *packed = static_cast<const uint8_t *>(g.packed) + strip * bytes;
      for (int64_t row = first; row < last; row += kRowsAtOnce) {
        float out[kRowsAtOnce * kStrip];
        int64_t count = minimum(kRowsAtOnce, last - row);
        by_rows[count - 1](g, packed, rows, row, out);
        write(g, out, row, count, strip * kStrip);
      }
    }
  });
}
