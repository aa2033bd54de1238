// Layout of weights in groups.
//
// A strip is 8 neighbouring outputs; a group is `group` neighbouring inputs with one scale for each
// output. Of each strip, the groups follow each other: the 8 scales, the 8 offsets if there are
// any, and the codes in units of 32 inputs (16 if the group has as many).
// 8 bits: each 32 bytes are 8 times 4 neighbouring inputs, one output after the other.
// 4 bits: the same, with the next 4 inputs in the high halves of the bytes.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace {

constexpr int64_t kBlock = 32;  // inputs of a row that share a scale
constexpr int64_t kStrip = 8;
constexpr int kZero = 8;  // 4-bit code of zero where there are no offsets

inline int64_t group_bytes(const tw_grouped &g) {
  int64_t scales = kStrip * (g.has_halves ? 2 : 4) * (g.has_offsets ? 2 : 1);
  return scales + g.group * kStrip * g.bits / 8;
}

inline int64_t strip_bytes(const tw_grouped &g) { return g.inputs / g.group * group_bytes(g); }

// Place of an 8-bit code in its unit.
inline int64_t byte_at(int64_t output, int64_t input) {
  return input / 4 * 32 + output * 4 + input % 4;
}

// Place of the byte of a 4-bit code in its unit; it is the high half if input / 4 is odd.
inline int64_t nibble_at(int64_t output, int64_t input) {
  return input / 8 * 32 + output * 4 + input % 4;
}

[[maybe_unused]] inline int32_t nibble(const uint8_t *codes, int64_t output, int64_t input) {
  uint8_t both = codes[nibble_at(output, input)];
  return input / 4 % 2 ? both >> 4 : both & 15;
}

// Returns the float of a half-precision number that is not a NaN or an infinity.
[[maybe_unused]] inline float half_to_float(uint16_t half) {
  int exponent = half >> 10 & 31, fraction = half & 1023;
  float magnitude = exponent ? __builtin_ldexpf(static_cast<float>(1024 + fraction), exponent - 25)
                             : __builtin_ldexpf(static_cast<float>(fraction), -24);
  return half >> 15 ? -magnitude : magnitude;
}

}  // namespace
