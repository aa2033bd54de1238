// Vectors of a panel's outputs (float_layout.h), and weights that are widened to them.
#pragma once

#include <string.h>

#include "float_layout.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define TW_INLINE __attribute__((always_inline)) inline

namespace {

#if defined(__AVX512F__)

using Vector = __m512;
constexpr int kMostRows = 12;  // that a kernel multiplies: their sums stay in registers
constexpr int kHalves = 1;     // passes over a line by a kernel of so many rows

TW_INLINE Vector broadcast(float value) { return _mm512_set1_ps(value); }
TW_INLINE Vector load(const float *from) { return _mm512_loadu_ps(from); }
TW_INLINE void store(float *to, Vector from) { _mm512_storeu_ps(to, from); }
TW_INLINE Vector fused(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
TW_INLINE Vector widen_halves(const uint16_t *from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
// Widens the first and the second of each pair.
TW_INLINE void widen_pairs(const uint16_t *from, Vector *firsts, Vector *seconds) {
  const __m512i pairs = _mm512_loadu_si512(from);
  *firsts = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  *seconds = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
}

#elif defined(__AVX2__)

using Vector = __m256;
constexpr int kMostRows = 6;
constexpr int kHalves = 2;

TW_INLINE Vector broadcast(float value) { return _mm256_set1_ps(value); }
TW_INLINE Vector load(const float *from) { return _mm256_loadu_ps(from); }
TW_INLINE void store(float *to, Vector from) { _mm256_storeu_ps(to, from); }
TW_INLINE Vector fused(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
TW_INLINE Vector widen_halves(const uint16_t *from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
TW_INLINE void widen_pairs(const uint16_t *from, Vector *firsts, Vector *seconds) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  *firsts = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  *seconds = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}

#elif defined(__aarch64__)

using Vector = float32x4_t;
constexpr int kMostRows = 6;
constexpr int kHalves = 2;

TW_INLINE Vector broadcast(float value) { return vdupq_n_f32(value); }
TW_INLINE Vector load(const float *from) { return vld1q_f32(from); }
TW_INLINE void store(float *to, Vector from) { vst1q_f32(to, from); }
TW_INLINE Vector fused(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
TW_INLINE Vector widen_halves(const uint16_t *from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}
TW_INLINE void widen_pairs(const uint16_t *from, Vector *firsts, Vector *seconds) {
  const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(from));
  *firsts = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
  *seconds = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
}

#else

typedef float Vector __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
constexpr int kMostRows = 6;
constexpr int kHalves = 2;

#pragma GCC diagnostic ignored "-Wpsabi"  // all calls with vectors are inlined

TW_INLINE Vector broadcast(float value) { return value - Vector{}; }
TW_INLINE Vector load(const float *from) {
  Vector values;
  memcpy(&values, from, sizeof values);
  return values;
}
TW_INLINE void store(float *to, const Vector &from) { memcpy(to, &from, sizeof from); }
TW_INLINE Vector fused(const Vector &a, const Vector &b, const Vector &c) { return a * b + c; }
TW_INLINE Vector widen_halves(const uint16_t *from) {
  Words bits;
  for (int i = 0; i < 8; i++) bits[i] = from[i];
  const Words sign = (bits & 0x8000) << 16, size = bits & 0x7fff, wide = size << 13;
  // Below 2^-14 there is no leading one: the difference to 2^-14 has the fraction's value.
  const Vector least = reinterpret_cast<Vector>(Words{} + 0x38800000u);
  const auto small = reinterpret_cast<Words>(reinterpret_cast<Vector>(wide + 0x38800000u) - least);
  const Words large = wide + 0x38000000u, broken = wide + 0x70000000u;  // 2^112, and to infinity
  const auto is_small = reinterpret_cast<Words>(size < 0x400);
  const auto is_broken = reinterpret_cast<Words>(size >= 0x7c00);
  const Words whole = (small & is_small) | (broken & is_broken) | (large & ~(is_small | is_broken));
  return reinterpret_cast<Vector>(whole | sign);
}
TW_INLINE void widen_pairs(const uint16_t *from, Vector *firsts, Vector *seconds) {
  Words pairs;
  memcpy(&pairs, from, sizeof pairs);
  *firsts = reinterpret_cast<Vector>(pairs << 16);
  *seconds = reinterpret_cast<Vector>(pairs & 0xffff0000u);
}

#endif

constexpr int kLanes = sizeof(Vector) / sizeof(float);
constexpr int kVectors = kPanel / kLanes;         // of a line
constexpr int kFew = kVectors / kHalves;          // of a half
constexpr int kApart = kVectors / 2;              // vectors between the outputs of a pair

// Returns the vector of a line that is vector v of a half. A half has both outputs of its pairs.
constexpr int vector_of(int v, int half) {
  constexpr int kPairs = kFew / 2;
  return half * kPairs + v % kPairs + v / kPairs * kApart;
}

// Widens the weights of a line, or of one of its halves.
template <int32_t kType, int kCount>
TW_INLINE void widen(const uint8_t *line, int half, Vector *out) {
  const auto *floats = reinterpret_cast<const float *>(line);
  const auto *halves = reinterpret_cast<const uint16_t *>(line);
  if (kType == TW_BFLOAT16) {
#pragma GCC unroll 4
    for (int v = 0; v < kCount / 2; v++) {
      const int pairs = kCount == kVectors ? v : half * (kCount / 2) + v;
      widen_pairs(halves + 2 * kLanes * pairs, out + v, out + v + kCount / 2);
    }
    return;
  }
#pragma GCC unroll 8
  for (int v = 0; v < kCount; v++) {
    const int at = kLanes * (kCount == kVectors ? v : vector_of(v, half));
    out[v] = kType == TW_FLOAT32 ? load(floats + at) : widen_halves(halves + at);
  }
}

}  // namespace
