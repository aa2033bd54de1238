// Numbers of a paged KV cache, computed with in vectors of float32.
#pragma once

#include <string.h>

#include <cstdint>

#include "scalars.h"
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(int32_t))));

struct float16 {
  uint16_t bits;
};

inline float load(float16 value) {
  uint32_t size = static_cast<uint32_t>(value.bits & 0x7fff) << 13, infinity = 0x7f800000;
  float scaled, rebias = 5.192296858534828e33f;  // 2^112, the difference of the biases
  memcpy(&scaled, &size, sizeof scaled);
  scaled *= rebias;  // exact, and right for denormal numbers too
  uint32_t bits;
  memcpy(&bits, &scaled, sizeof bits);
  if ((value.bits & 0x7fff) >= 0x7c00) bits = infinity | size;
  bits |= static_cast<uint32_t>(value.bits & 0x8000) << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

// Rounds to nearest even. Numbers beyond the type's range become its largest: one huge key must not
// turn a whole context into NaN.
inline void store(float16 *to, float value) {
  constexpr float kMost = 65504.0f;
  value = value > kMost ? kMost : value < -kMost ? -kMost : value;
#if defined(__AVX2__)
  to->bits = static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  const __fp16 half = static_cast<__fp16>(value);
  memcpy(&to->bits, &half, sizeof half);
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff, rounded;
  if (value != value) {
    rounded = 0x7e00;
  } else if (size < 0x38800000) {  // below 2^-14: the unit in the last place of 0.5 is 2^-24
    float shifted;
    memcpy(&shifted, &size, sizeof shifted);
    shifted += 0.5f;
    memcpy(&rounded, &shifted, sizeof rounded);
    rounded -= 0x3f000000;
  } else {
    rounded = ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10);
  }
  to->bits = static_cast<uint16_t>(sign | rounded);
#endif
}

inline float load(int8_t value) { return value; }

inline Lanes broadcast(float value) { return value - Lanes{}; }

inline Lanes widen(const float *from) {
  Lanes lanes;
  memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

#if defined(__AVX512F__)
inline Lanes widen(const bfloat16 *from) {
  const auto words = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

inline Lanes widen(const float16 *from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}

inline Lanes widen(const int8_t *from) {
  const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
#elif defined(__AVX2__)
inline Lanes widen(const bfloat16 *from) {
  const auto words = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

inline Lanes widen(const float16 *from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

inline Lanes widen(const int8_t *from) {
  const auto bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
#elif defined(__aarch64__)
inline Lanes widen(const bfloat16 *from) {
  const uint16x4_t words = vld1_u16(reinterpret_cast<const uint16_t *>(from));
  return reinterpret_cast<Lanes>(vshll_n_u16(words, 16));
}

inline Lanes widen(const float16 *from) {
  const uint16x4_t words = vld1_u16(reinterpret_cast<const uint16_t *>(from));
  return reinterpret_cast<Lanes>(vcvt_f32_f16(vreinterpret_f16_u16(words)));
}

inline Lanes widen(const int8_t *from) {
  int32_t four;
  memcpy(&four, from, sizeof four);
  const int16x8_t words = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return reinterpret_cast<Lanes>(vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))));
}
#else
template <typename Number>
Lanes widen(const Number *from) {
  Lanes lanes;
  for (int64_t i = 0; i < kLanes; i++) lanes[i] = load(from[i]);
  return lanes;
}
#endif

inline void store(float *to, Lanes lanes) { memcpy(to, &lanes, sizeof lanes); }

// A NaN in `a` stays one.
inline Lanes at_least(Lanes a, Lanes least) { return a < least ? least : a; }
inline Lanes at_most(Lanes a, Lanes most) { return a > most ? most : a; }

inline float highest_of(Lanes lanes) {
  float highest = lanes[0];
  for (int64_t i = 1; i < kLanes; i++) highest = lanes[i] > highest ? lanes[i] : highest;
  return highest;
}

inline float sum_of(Lanes lanes) {
  float sum = 0;
  for (int64_t i = 0; i < kLanes; i++) sum += lanes[i];
  return sum;
}

constexpr float kLog2E = 1.44269504088896341f;

// Returns 2^x to 2 ulp (Cephes exp2f), and zero below 2^-126. x: at most 127.
inline Lanes power_of_two(Lanes x) {
  const Lanes least = broadcast(-126.0f);
  Lanes bounded = at_least(x, least);
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  Lanes shifted = bounded + 12582912.0f;
  Lanes r = bounded - (shifted - 12582912.0f);
  Lanes p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  p = p * r + 1.0f;
  Integers exponent = (reinterpret_cast<Integers>(shifted) - (0x4b400000 - 127)) << 23;
  return x < least ? Lanes{} : p * reinterpret_cast<Lanes>(exponent);
}

inline float power_of_two(float x) { return power_of_two(broadcast(x > 127.0f ? 127.0f : x))[0]; }

// Returns tanh(x) with an absolute error of 2e-7.
inline Lanes hyperbolic_tangent(Lanes x) {
  return 1.0f - 2.0f / (power_of_two(at_most(x * (2 * kLog2E), broadcast(126.0f))) + 1.0f);
}

}  // namespace
