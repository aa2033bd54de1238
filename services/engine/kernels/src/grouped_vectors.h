// Vectors of 8 neighbouring outputs: 256 bits on every x86 processor.
#pragma once

#include <string.h>

#include "grouped_layout.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// A call would spill the sums from their registers.
#define TW_INLINE __attribute__((always_inline)) inline

namespace {

#if defined(__AVX2__)

using Vector = __m256;     // of a strip's outputs
using Integers = __m256i;  // 32-bit sums of a strip's outputs, or codes of four inputs of each

TW_INLINE Vector zero() { return _mm256_setzero_ps(); }
TW_INLINE Vector broadcast(float value) { return _mm256_set1_ps(value); }
TW_INLINE Vector fused(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
TW_INLINE Vector plus(Vector a, Vector b) { return _mm256_add_ps(a, b); }
TW_INLINE Vector less(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
TW_INLINE Vector times(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
TW_INLINE Vector load(const float *from) { return _mm256_loadu_ps(from); }
TW_INLINE void store(float *to, Vector from) { _mm256_storeu_ps(to, from); }
TW_INLINE Vector to_float(Integers values) { return _mm256_cvtepi32_ps(values); }

TW_INLINE Vector load_floats(const uint8_t *from) {
  return _mm256_loadu_ps(reinterpret_cast<const float *>(from));
}
TW_INLINE Vector load_halves(const uint8_t *from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
TW_INLINE Integers load_whole_levels(const uint8_t *from) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
}
TW_INLINE Vector load_levels(const uint8_t *from) { return to_float(load_whole_levels(from)); }
TW_INLINE Vector load_exponents(const uint8_t *from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23));
}

TW_INLINE Integers load_codes(const uint8_t *from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
}
TW_INLINE void store_codes(uint8_t *to, Integers codes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), codes);
}

// Copies 32 bits to every lane: four codes of a row, or two of 16 bits.
template <typename T>
TW_INLINE Integers broadcast_bits(const T *from) {
  int32_t bits;
  memcpy(&bits, from, sizeof bits);
  return _mm256_set1_epi32(bits);
}

#else  // any processor

struct Vector {
  float lanes[kStrip];
};

struct Integers {
  int32_t lanes[kStrip];
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
inline Vector plus(Vector a, Vector b) {
  for (int64_t i = 0; i < kStrip; i++) a.lanes[i] += b.lanes[i];
  return a;
}
inline Vector less(Vector a, Vector b) {
  for (int64_t i = 0; i < kStrip; i++) a.lanes[i] -= b.lanes[i];
  return a;
}
inline Vector times(Vector a, Vector b) {
  for (int64_t i = 0; i < kStrip; i++) a.lanes[i] *= b.lanes[i];
  return a;
}
inline Vector load(const float *from) {
  Vector v;
  memcpy(v.lanes, from, sizeof v.lanes);
  return v;
}
inline void store(float *to, Vector from) { memcpy(to, from.lanes, sizeof from.lanes); }
inline Vector to_float(Integers values) {
  Vector v;
  for (int64_t i = 0; i < kStrip; i++) v.lanes[i] = static_cast<float>(values.lanes[i]);
  return v;
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

#endif

// Loads the scales or offsets of a strip's group. factors: those of its 256 inputs, for levels.
template <int kNumbers>
TW_INLINE Vector load_numbers(const uint8_t *from, const uint8_t *factors) {
  if (kNumbers == TW_LEVELS) return times(load_halves(factors), load_levels(from));
  if (kNumbers == TW_EXPONENTS) return load_exponents(from);
  return kNumbers == TW_HALVES ? load_halves(from) : load_floats(from);
}

}  // namespace
