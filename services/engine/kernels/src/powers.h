// Powers of 2 in bfloat16, from a table: what scores become in attention.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

// In bfloat16 exponent and significand lie side by side: but for the seven bits of its significand,
// 2^x is x in units of 1/128, plus the exponent of 1.
constexpr float kUnits = 128;
constexpr float kOne = 127;

// The seven bits of significand of 2^(i / 128).
struct alignas(64) Significands {
  uint8_t of[128] = {};

  constexpr Significands() {
    double power = 1;
    for (int i = 0; i < 128; i++, power *= 1.0054299011128028)
      of[i] = static_cast<uint8_t>((power - 1) * 128 + 0.5);
  }
};

constexpr Significands kSignificands;

// The powers of 2 of 32 exponents in units, in bfloat16: nothing below 0, no number past 0x7fff. An
// exponent that no int32 holds, 2^24 above the base, arrives as the least, so is nothing too.
// They are rounded twice, the exponent to a unit (0.3 % of the power) and the power to bfloat16.
inline __m512i powers(__m512i low, __m512i high) {
  const __m512i near = _mm512_load_si512(kSignificands.of);
  const __m512i far = _mm512_load_si512(kSignificands.of + 64);
  __m512i units = _mm512_max_epi16(_mm512_packs_epi32(low, high), _mm512_setzero_si512());
  __m512i significands = _mm512_permutex2var_epi8(near, units, far);
  constexpr int kSelect = 0xca;  // where a bit of the first is set the second's, else the third's
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(0x7f), significands, units, kSelect);
}

// Which row of a value tile holds the `pair`th two of 32 tokens: as powers() orders their weights.
constexpr int64_t pair_row(int64_t pair) { return pair % 8 / 2 * 4 + pair / 8 * 2 + pair % 2; }

// Adds the sum of each two neighbours to the lane that they lie in.
inline __m512 add_pairs(__m512 sum, __m512i powers) {
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(powers),
                          reinterpret_cast<__m512bh>(ones));
}

}  // namespace
