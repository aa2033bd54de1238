// Vectors of 8 neighbouring outputs: 256 bits, two registers on aarch64.
#pragma once

#include <string.h>

#include "grouped_layout.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AVX2__) || defined(__aarch64__)
#define TW_HAS_VECTORS
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

TW_INLINE Integers no_integers() { return _mm256_setzero_si256(); }
TW_INLINE Integers as_integers(Vector values) { return _mm256_castps_si256(values); }
TW_INLINE Integers either(Integers a, Integers b) { return _mm256_or_si256(a, b); }
TW_INLINE Integers masked(Integers bytes, int mask) {
  return _mm256_and_si256(bytes, _mm256_set1_epi8(static_cast<char>(mask)));
}
// Shift pairs of bytes: what crosses from one into the other has to be masked.
template <int kBits>
TW_INLINE Integers raised(Integers bytes) {
  return _mm256_slli_epi16(bytes, kBits);
}
template <int kBits>
TW_INLINE Integers lowered(Integers bytes) {
  return _mm256_srli_epi16(bytes, kBits);
}
// Replaces bytes below 16 by the table's.
TW_INLINE Integers look_up(const int8_t *table, Integers codes) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), codes);
}
// Returns byte `at` of each lane.
TW_INLINE Integers bytes_at(Integers lanes, int64_t at, bool is_signed) {
  lanes = _mm256_sll_epi32(lanes, _mm_cvtsi64_si128((3 - at) * 8));
  return is_signed ? _mm256_srai_epi32(lanes, 24) : _mm256_srli_epi32(lanes, 24);
}

#elif defined(__aarch64__)

struct Vector {  // of a strip's outputs
  float32x4_t low, high;
};

struct Integers {  // 32-bit sums of a strip's outputs, or codes of four inputs of each
  int32x4_t low, high;
};

TW_INLINE Vector broadcast(float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
TW_INLINE Vector zero() { return broadcast(0); }
TW_INLINE Vector fused(Vector a, Vector b, Vector c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
TW_INLINE Vector plus(Vector a, Vector b) { return {a.low + b.low, a.high + b.high}; }
TW_INLINE Vector less(Vector a, Vector b) { return {a.low - b.low, a.high - b.high}; }
TW_INLINE Vector times(Vector a, Vector b) { return {a.low * b.low, a.high * b.high}; }
TW_INLINE Vector load(const float *from) { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
TW_INLINE void store(float *to, Vector from) {
  vst1q_f32(to, from.low);
  vst1q_f32(to + 4, from.high);
}
TW_INLINE Vector to_float(Integers values) {
  return {vcvtq_f32_s32(values.low), vcvtq_f32_s32(values.high)};
}

TW_INLINE Integers load_codes(const uint8_t *from) {
  return {vreinterpretq_s32_u8(vld1q_u8(from)), vreinterpretq_s32_u8(vld1q_u8(from + 16))};
}
TW_INLINE void store_codes(uint8_t *to, Integers codes) {
  vst1q_u8(to, vreinterpretq_u8_s32(codes.low));
  vst1q_u8(to + 16, vreinterpretq_u8_s32(codes.high));
}
TW_INLINE Vector load_floats(const uint8_t *from) {
  const Integers bits = load_codes(from);
  return {vreinterpretq_f32_s32(bits.low), vreinterpretq_f32_s32(bits.high)};
}
TW_INLINE Vector load_halves(const uint8_t *from) {
  const float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8(from));
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
TW_INLINE Vector load_levels(const uint8_t *from) {
  const int16x8_t levels = vmovl_s8(vreinterpret_s8_u8(vld1_u8(from)));
  return to_float({vmovl_s16(vget_low_s16(levels)), vmovl_high_s16(levels)});
}
TW_INLINE Vector load_exponents(const uint8_t *from) {
  const uint16x8_t exponents = vmovl_u8(vld1_u8(from));
  return {vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(exponents)), 23)),
          vreinterpretq_f32_u32(vshlq_n_u32(vmovl_high_u16(exponents), 23))};
}

// Copies 32 bits to every lane: four codes of a row.
template <typename T>
TW_INLINE Integers broadcast_bits(const T *from) {
  int32_t bits;
  memcpy(&bits, from, sizeof bits);
  return {vdupq_n_s32(bits), vdupq_n_s32(bits)};
}

TW_INLINE Integers no_integers() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
TW_INLINE Integers as_integers(Vector values) {
  return {vreinterpretq_s32_f32(values.low), vreinterpretq_s32_f32(values.high)};
}
TW_INLINE Integers either(Integers a, Integers b) { return {a.low | b.low, a.high | b.high}; }
TW_INLINE Integers masked(Integers bytes, int mask) {
  const int32x4_t masks = vreinterpretq_s32_u8(vdupq_n_u8(static_cast<uint8_t>(mask)));
  return {bytes.low & masks, bytes.high & masks};
}
// Shift pairs of bytes: what crosses from one into the other has to be masked.
template <int kBits>
TW_INLINE Integers raised(Integers bytes) {
  return {vreinterpretq_s32_u16(vshlq_n_u16(vreinterpretq_u16_s32(bytes.low), kBits)),
          vreinterpretq_s32_u16(vshlq_n_u16(vreinterpretq_u16_s32(bytes.high), kBits))};
}
template <int kBits>
TW_INLINE Integers lowered(Integers bytes) {
  return {vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(bytes.low), kBits)),
          vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(bytes.high), kBits))};
}
// Replaces bytes below 16 by the table's.
TW_INLINE Integers look_up(const int8_t *table, Integers codes) {
  const int8x16_t values = vld1q_s8(table);
  return {vreinterpretq_s32_s8(vqtbl1q_s8(values, vreinterpretq_u8_s32(codes.low))),
          vreinterpretq_s32_s8(vqtbl1q_s8(values, vreinterpretq_u8_s32(codes.high)))};
}
// Returns byte `at` of each lane.
TW_INLINE Integers bytes_at(Integers lanes, int64_t at, bool is_signed) {
  const int32x4_t shift = vdupq_n_s32(static_cast<int32_t>(3 - at) * 8);
  const int32x4_t low = vshlq_s32(lanes.low, shift), high = vshlq_s32(lanes.high, shift);
  if (is_signed) return {vshrq_n_s32(low, 24), vshrq_n_s32(high, 24)};
  return {vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(low), 24)),
          vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(high), 24))};
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
