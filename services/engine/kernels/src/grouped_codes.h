// Reading of weights in groups (grouped_layout.h), 16 outputs at a time.
#pragma once

#include "buffer.h"
#include "grouped_layout.h"
#include "kernels.h"
#include "tiles.h"

namespace {

constexpr int64_t kHalf = kTileInner / 2;  // inputs of the smallest group
constexpr int64_t kLine = 64;              // bytes: four inputs of 16 outputs
constexpr int64_t kPanelStrips = 2 * kTileStrips;

// The codes of two strips in one vector: lane l has inputs of output l.
inline __m512i load_codes(const uint8_t *first, const uint8_t *second) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(first));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(second));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

inline __m512 load_halves(const uint8_t *first, const uint8_t *second) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i *>(first));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i *>(second));
  return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}

inline __m512 load_levels(const uint8_t *first, const uint8_t *second) {
  const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(first));
  const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(second));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_unpacklo_epi64(low, high)));
}

inline __m512 load_exponents(const uint8_t *first, const uint8_t *second) {
  const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(first));
  const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(second));
  const __m512i exponents = _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(low, high));
  return _mm512_castsi512_ps(_mm512_slli_epi32(exponents, 23));
}

// Returns a table of values, raised to have no sign.
inline __m512i load_values(const tw_grouped &g) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i *>(g.values));
  return _mm512_broadcast_i32x4(_mm_xor_si128(values, _mm_set1_epi8(-128)));
}

// Passes 16 inputs of two strips on, a byte each, as take(four, codes): `four` neighbouring inputs
// of 16 outputs. The bytes have no sign.
template <int kCoding, typename Take>
TW_ALWAYS_INLINE inline void expand(const uint8_t *first, const uint8_t *second, __m512i values,
                                    const Take &take) {
  if (kCoding == 8) {
    const __m512i sign = _mm512_set1_epi8(-128);  // stored codes have one
#pragma GCC unroll 4
    for (int four = 0; four < 4; four++)
      take(four, _mm512_xor_si512(load_codes(first + 32 * four, second + 32 * four), sign));
    return;
  }
  const __m512i low_bits = _mm512_set1_epi8(15), high_bits = _mm512_set1_epi8(48);
  const __m512i high = kCoding == 6 ? load_codes(first + 64, second + 64) : _mm512_setzero_si512();
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; pair++) {
    const __m512i both = load_codes(first + 32 * pair, second + 32 * pair);
    __m512i even = _mm512_and_si512(both, low_bits);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(both, 4), low_bits);
    if (kCoding == 6) {
      constexpr int kOrMasked = 0xf8;  // a | (b & c)
      even = _mm512_ternarylogic_epi32(even, pair ? high : _mm512_slli_epi32(high, 4), high_bits,
                                       kOrMasked);
      odd = _mm512_ternarylogic_epi32(
          odd, pair ? _mm512_srli_epi32(high, 2) : _mm512_slli_epi32(high, 2), high_bits, kOrMasked);
    }
    if (kCoding == kValues) {
      even = _mm512_shuffle_epi8(values, even);
      odd = _mm512_shuffle_epi8(values, odd);
    }
    take(2 * pair, even);
    take(2 * pair + 1, odd);
  }
}

// Two strips: the 16 outputs of a tile.
struct Strips {
  const uint8_t *first, *second;
};

// Scales and offsets of 16 outputs.
struct TileNumbers {
  __m512 scale, offset;
};

// Packed weights.
class Codes {
 public:
  explicit Codes(const tw_linear &a)
      : groups_(*a.groups),
        packed_(static_cast<const uint8_t *>(a.packed)),
        strip_bytes_(strip_bytes(*a.groups)),
        each_bytes_(number_bytes(*a.groups)),
        number_bytes_(each_bytes_ * (a.groups->has_offsets ? 2 : 1)),
        factor_bytes_(factor_bytes(*a.groups)),
        group_(static_cast<uint32_t>(a.groups->group)),
        coding_(coding_of(*a.groups)),
        numbers_(a.groups->numbers),
        has_offsets_(a.groups->has_offsets),
        ahead_(tw_instruction_set() < TW_AMX ? kFarAhead : kAhead),
        values_(load_values(*a.groups)) {}

  int coding() const { return coding_; }
  bool has_halves() const { return group_ < kTileInner; }
  bool has_offsets() const { return has_offsets_; }

  // Makes a panel ready for `strips` in this thread, until another one is.
  void prepare(int64_t panel) const {
    if (!groups_.mapped) return;
    auto *to = static_cast<uint8_t *>(mapped_panel.reserve(kPanelStrips * strip_bytes_));
    tw_pack_mapped(&groups_, panel * kPanelStrips, kPanelStrips, to);
  }

  // Returns the strips of tile 0 or 1 of a panel.
  Strips strips(int64_t panel, int64_t tile) const {
    const uint8_t *first = groups_.mapped ? static_cast<const uint8_t *>(mapped_panel.data())
                                          : packed_ + panel * kPanelStrips * strip_bytes_;
    first += tile * kTileStrips * strip_bytes_;
    return {first, first + strip_bytes_};
  }

  // Where the numbers and codes of an input are in a strip.
  struct Place {
    int64_t numbers, factors, codes;
  };

  template <int kCoding>
  Place place(int64_t input) const {
    constexpr int kBits = bits_of(kCoding);
    const auto at = static_cast<uint32_t>(input);
    const int64_t group = at / group_, super = at / kSuper;
    const int64_t group_bytes = number_bytes_ + group_ * kBits;
    const int64_t numbers = group * group_bytes + (super + 1) * factor_bytes_;
    return {numbers, super * (kSuper / group_ * group_bytes + factor_bytes_),
            numbers + number_bytes_ + (at % group_) * kBits};
  }

  // Asks for a line that comes `ahead_` bytes later; past the strips' end, for one of the next panel.
  void fetch(const Strips &strips, int64_t place) const {
    place += ahead_;
    if (place >= strip_bytes_) place += (kPanelStrips - 1) * strip_bytes_;
    _mm_prefetch(strips.first + place, _MM_HINT_T0);
    _mm_prefetch(strips.second + place, _MM_HINT_T0);
  }

  // Asks for what `fetch` leaves out: the beginning of the first panel.
  void begin(int64_t panel) const {
    if (groups_.mapped) return;
    for (int64_t tile = 0; tile < 2; tile++)
      for (int64_t at = 0; at < smaller(ahead_, strip_bytes_); at += kLine)
        fetch(strips(panel, tile), at - ahead_);
  }

  // Passes on the 16 inputs of the codes at a place of strips.
  template <int kCoding, typename Take>
  TW_ALWAYS_INLINE void expand_at(const Strips &strips, int64_t place, const Take &take) const {
    expand<kCoding>(strips.first + place, strips.second + place, values_, take);
  }

  // Returns the weights of an input.
  template <int kCoding>
  __m512 column(const Strips &strips, int64_t input) const {
    const int64_t within = input % kHalf;
    const Place at = place<kCoding>(input - within);
    __m512i bytes = _mm512_setzero_si512();
    expand_at<kCoding>(strips, at.codes, [&](int four, __m512i codes) TW_ALWAYS_INLINE {
      if (four == within / 4) bytes = codes;
    });
    const __m128i shift = _mm_cvtsi64_si128(within % 4 * 8);
    bytes = _mm512_and_si512(_mm512_srl_epi32(bytes, shift), _mm512_set1_epi32(255));
    const TileNumbers found = numbers<kCoding>(strips, at);
    const __m512 code = _mm512_cvtepi32_ps(bytes);
    if (has_offsets_) return _mm512_fmadd_ps(found.scale, code, found.offset);
    return _mm512_mul_ps(found.scale, _mm512_sub_ps(code, _mm512_set1_ps(zero_of(kCoding))));
  }

  template <int kCoding>
  TW_ALWAYS_INLINE TileNumbers numbers(const Strips &strips, const Place &at) const {
    const __m512 scale = load(strips, at.numbers, at.factors);
    if (!has_offsets_) return {scale, scale};
    const __m512 offset = load(strips, at.numbers + each_bytes_, at.factors + 2 * kStrip);
    // With 8 bits, offsets are those of codes with a sign.
    return {scale, kCoding == 8 ? _mm512_fnmadd_ps(scale, _mm512_set1_ps(128), offset) : offset};
  }

 private:
  // Bytes of a strip between those read and those prefetched, as measured: on Sapphire Rapids, and on
  // Zen 5, where 1,024 reach half of the memory's speed.
  static constexpr int64_t kAhead = 1024;
  static constexpr int64_t kFarAhead = 4096;

  TW_ALWAYS_INLINE __m512 load(const Strips &strips, int64_t at, int64_t factors) const {
    const uint8_t *first = strips.first, *second = strips.second;
    if (numbers_ == TW_HALVES) return load_halves(first + at, second + at);
    if (numbers_ == TW_EXPONENTS) return load_exponents(first + at, second + at);
    if (numbers_ == TW_FLOATS) return _mm512_castsi512_ps(load_codes(first + at, second + at));
    return _mm512_mul_ps(load_halves(first + factors, second + factors),
                         load_levels(first + at, second + at));
  }

  static thread_local Buffer mapped_panel;

  tw_grouped groups_;
  const uint8_t *packed_;
  int64_t strip_bytes_, each_bytes_, number_bytes_, factor_bytes_;
  uint32_t group_;
  int coding_;
  int32_t numbers_, has_offsets_;
  int64_t ahead_;
  __m512i values_;
};

thread_local Buffer Codes::mapped_panel;

}  // namespace
