// Powers of 2 in bfloat16 from a table, for attention weights.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

// The bits of 2^x in bfloat16 are x in units of 1/128 plus the exponent of 1, except that a table
// replaces the seven bits of the significand.
constexpr float kUnits = 128;
constexpr float kOne = 127;

// Significands of 2^(i / 128), seven bits each.
struct alignas(64) Significands {
  uint8_t of[128] = {};

  constexpr Significands() {
    double power = 1;
    for (int i = 0; i < 128; i++, power *= 1.0054299011128028)
      of[i] = static_cast<uint8_t>((power - 1) * 128 + 0.5);
  }
};

constexpr Significands kSignificands;

// Returns 2^x in bfloat16 for 32 exponents in units: 0 for exponents below 0, NaN past 0x7fff. An
// exponent beyond int32, 2^24 above the base, arrives as the least int32 and gives 0 too. Rounding
// is twofold: the exponent to a unit (0.3 % of the power), and the power to bfloat16.
inline __m512i powers(__m512i low, __m512i high) {
  const __m512i near = _mm512_load_si512(kSignificands.of);
  const __m512i far = _mm512_load_si512(kSignificands.of + 64);
  __m512i units = _mm512_max_epi16(_mm512_packs_epi32(low, high), _mm512_setzero_si512());
  __m512i significands = _mm512_permutex2var_epi8(near, units, far);
  constexpr int kSelect = 0xca;  // a ? b : c, bit by bit
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(0x7f), significands, units, kSelect);
}

// Returns the row of a value tile that holds the `pair`th two of 32 tokens, in the order of
// powers().
constexpr int64_t pair_row(int64_t pair) { return pair % 8 / 2 * 4 + pair / 8 * 2 + pair % 2; }

// Adds each pair of neighbouring powers to the lane that holds them.
inline __m512 add_pairs(__m512 sum, __m512i powers) {
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(powers),
                          reinterpret_cast<__m512bh>(ones));
}

}  // namespace
