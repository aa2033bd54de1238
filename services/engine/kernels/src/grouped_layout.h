// Layout of weights in groups.
//
// A strip is 8 neighbouring outputs; a group is `group` neighbouring inputs with one scale for each
// output. Of each strip, the groups follow each other: the 8 scales, the 8 offsets if there are
// any, and the codes in units of 32 inputs (16 if the group has as many). Before each 256 inputs of
// levels are their 8 factors, and the 8 factors of the offsets.
// 8 bits, with a sign: each 32 bytes are 8 times 4 neighbouring inputs, one output after the other.
// 4 bits: the same, with the next 4 inputs in the high halves of the bytes.
// 6 bits: for each 16 inputs, their low 4 bits, and 32 bytes of high bits: the first 4 inputs' in the
// lowest bits of 8 times 4 bytes, the next 4 inputs' above them.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace {

constexpr int64_t kBlock = 32;  // inputs of a row that share a scale
constexpr int64_t kStrip = 8;
constexpr int64_t kTileStrips = 2;  // strips in a tile's columns
constexpr int64_t kSuper = 256;  // inputs that share the factors of their levels
constexpr int64_t kSixes = 96;   // bytes of 16 inputs with 6 bits

// How the kernels read codes: as numbers of 4, 6 or 8 bits, or as the numbers of values.
constexpr int kValues = 0;

inline int coding_of(const tw_grouped &g) { return g.has_values ? kValues : g.bits; }

constexpr int bits_of(int coding) { return coding == kValues ? 4 : coding; }

// Number without a sign that stands for zero where there are no offsets. Values are raised by it.
constexpr int zero_of(int coding) { return 1 << ((coding == kValues ? 8 : coding) - 1); }

constexpr int64_t bytes_each(int numbers) {
  return numbers == TW_FLOATS ? 4 : numbers == TW_HALVES ? 2 : 1;
}

// Bytes of a strip's scales or offsets in a group.
inline int64_t number_bytes(const tw_grouped &g) { return kStrip * bytes_each(g.numbers); }

// Bytes of a strip's factors for 256 inputs.
inline int64_t factor_bytes(const tw_grouped &g) {
  return g.numbers == TW_LEVELS ? kStrip * 2 * (g.has_offsets ? 2 : 1) : 0;
}

inline int64_t strip_bytes(const tw_grouped &g) {
  int64_t numbers = number_bytes(g) * (g.has_offsets ? 2 : 1);
  return g.inputs / g.group * (numbers + g.group * kStrip * g.bits / 8) +
         g.inputs / kSuper * factor_bytes(g);
}

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

// Place of the byte of a 6-bit code's high bits in its unit.
inline int64_t high_at(int64_t output, int64_t input) {
  return input / 16 * kSixes + 64 + output * 4 + input % 4;
}

[[maybe_unused]] inline int32_t six(const uint8_t *codes, int64_t output, int64_t input) {
  int32_t low = nibble(codes + input / 16 * kSixes, output, input % 16);
  return low | (codes[high_at(output, input)] >> (2 * (input / 4 % 4)) & 3) << 4;
}

// Returns the float of a half-precision number that is not a NaN or an infinity.
[[maybe_unused]] inline float half_to_float(uint16_t half) {
  int exponent = half >> 10 & 31, fraction = half & 1023;
  float magnitude = exponent ? __builtin_ldexpf(static_cast<float>(1024 + fraction), exponent - 25)
                             : __builtin_ldexpf(static_cast<float>(fraction), -24);
  return half >> 15 ? -magnitude : magnitude;
}

}  // namespace
