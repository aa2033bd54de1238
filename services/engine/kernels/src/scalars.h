// Elements of tensors in float32 and bfloat16, computed with in float32.
#pragma once

#include <string.h>

#include <cstdint>

namespace {

struct bfloat16 {
  uint16_t bits;
};

inline float load(float value) { return value; }
inline float load(bfloat16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

inline void store(float *to, float value) { *to = value; }
inline void store(bfloat16 *to, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  // Round to nearest even; a NaN's payload must not round up to infinity.
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = static_cast<uint16_t>(value != value ? (bits >> 16) | 0x40 : rounded);
}

}  // namespace
