// Exponential function in plain C++ that the compiler vectorises.
#pragma once

#include <string.h>

#include <cstdint>

namespace {

inline float minimum(float a, float b) { return a < b ? a : b; }
inline float maximum(float a, float b) { return a > b ? a : b; }
inline int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }

// Returns e^x to 2 ulp (Cephes expf), branch-free so that loops around it vectorise.
inline float exponential(float x) {
  x = maximum(minimum(x, 88.0f), -87.0f);
  float n = x * 1.44269504088896341f;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  float shifted = n + 12582912.0f;
  n = shifted - 12582912.0f;
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = ((bits - 0x4b400000u) + 127u) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return p * power;
}

// Returns log(1 + e^x). Of 2 atanh(z) = log((1 + z) / (1 - z)), seven terms leave less than 1e-8
// for z up to 1/3.
inline float softplus(float x) {
  const float power = exponential(-maximum(x, -x)), z = power / (2.0f + power), square = z * z;
  float sum = 1.0f / 13.0f;
  sum = sum * square + 1.0f / 11.0f;
  sum = sum * square + 1.0f / 9.0f;
  sum = sum * square + 1.0f / 7.0f;
  sum = sum * square + 1.0f / 5.0f;
  sum = sum * square + 1.0f / 3.0f;
  sum = sum * square + 1.0f;
  return x != x ? x : maximum(x, 0.0f) + 2.0f * z * sum;  // a NaN remains one
}

}  // namespace
