// Codes as files store them, and the units (grouped_layout.h) that they are packed into.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <string.h>

#include "exponential.h"
#include "grouped_layout.h"
#include "kernels.h"

namespace {

inline uint32_t load_four(const uint8_t *codes) {
  uint32_t four;
  memcpy(&four, codes, sizeof four);
  return four;
}

inline void store_four(uint32_t four, uint8_t *to) { memcpy(to, &four, sizeof four); }

#if defined(__AVX2__)

// Four neighbouring numbers of four bytes from each output of a strip, by outputs and then by numbers.
struct Columns {
  __m256i each[4];

  explicit Columns(const __m128i *rows) {
    __m256i pairs[4];
    for (int i = 0; i < 4; i++)
      pairs[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(rows[i]), rows[i + 4], 1);
    const __m256i first = _mm256_unpacklo_epi32(pairs[0], pairs[1]);
    const __m256i second = _mm256_unpacklo_epi32(pairs[2], pairs[3]);
    const __m256i third = _mm256_unpackhi_epi32(pairs[0], pairs[1]);
    const __m256i fourth = _mm256_unpackhi_epi32(pairs[2], pairs[3]);
    each[0] = _mm256_unpacklo_epi64(first, second);
    each[1] = _mm256_unpackhi_epi64(first, second);
    each[2] = _mm256_unpacklo_epi64(third, fourth);
    each[3] = _mm256_unpackhi_epi64(third, fourth);
  }

  void store(int count, uint8_t *to) const {
    for (int i = 0; i < count; i++)
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + 32 * i), each[i]);
  }
};

inline __m128i load_codes_of_16(const uint8_t *from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
}

// Puts each other four codes into the high halves of the bytes before.
inline __m128i join_nibbles(__m128i codes) {
  const __m128i low = _mm_and_si128(codes, _mm_set1_epi8(15));
  return _mm_shuffle_epi32(_mm_or_si128(low, _mm_srli_epi64(low, 28)), 0x08);
}

// Returns the two higher bits of 16 codes: the first four codes' are the lowest.
inline __m128i join_high_bits(__m128i codes) {
  const __m128i bits = _mm_and_si128(_mm_srli_epi16(codes, 4), _mm_set1_epi8(3));
  __m128i all = _mm_sllv_epi32(bits, _mm_setr_epi32(0, 2, 4, 6));
  all = _mm_or_si128(all, _mm_shuffle_epi32(all, 0x4e));
  return _mm_or_si128(all, _mm_shuffle_epi32(all, 0xb1));
}

// Does pack_unit for 16 inputs of a whole strip.
template <int kBits>
inline void pack_half_unit(const uint8_t *const *rows, int64_t first, uint8_t *to) {
  __m128i each[kStrip];
#pragma GCC unroll 8
  for (int64_t output = 0; output < kStrip; output++) {
    const __m128i codes = load_codes_of_16(rows[output] + first);
    if (kBits == 8)
      each[output] = _mm_xor_si128(codes, _mm_set1_epi8(-128));
    else if (kBits == 4)
      each[output] = join_nibbles(codes);
    else
      each[output] = _mm_unpacklo_epi64(join_nibbles(codes), join_high_bits(codes));
  }
  Columns(each).store(kBits / 2, to);
}

#endif

// Writes the codes of a unit, whose first input is `first`. rows: codes of each output.
void pack_unit(const tw_grouped &g, const uint8_t *const *rows, int64_t first, int64_t outputs,
               uint8_t *to) {
  constexpr uint32_t kLow = 0x0f0f0f0f, kHigh = 0x03030303, kSign = 0x80808080;
  int64_t unit = minimum(g.group, kBlock);
  for (int64_t output = 0; output < outputs; output++) {
    const uint8_t *from = rows[output] + first;
    if (g.bits == 8) {
      for (int64_t input = 0; input < unit; input += 4)
        store_four(load_four(from + input) ^ kSign, to + byte_at(output, input));
      continue;
    }
    for (int64_t input = 0; input < unit; input += 8) {
      uint32_t both = load_four(from + input) & kLow;
      both |= (load_four(from + input + 4) & kLow) << 4;
      int64_t base = g.bits == 6 ? input / 16 * kSixes + nibble_at(output, input % 16)
                                 : nibble_at(output, input);
      store_four(both, to + base);
    }
    if (g.bits == 4) continue;
    for (int64_t input = 0; input < unit; input += 16) {
      uint32_t high = 0;
      for (int64_t i = 0; i < 4; i++)
        high |= (load_four(from + input + 4 * i) >> 4 & kHigh) << (2 * i);
      store_four(high, to + high_at(output, input));
    }
  }
}

// Eight codes in each word.
typedef uint64_t TwoWords __attribute__((vector_size(16)));
typedef uint64_t FourWords __attribute__((vector_size(32)));

// Writes the bits of a run of bytes, a byte each, or adds them to codes that have others.
template <typename Words, int kBits, int kRun>
inline void unpack_run(const uint8_t *from, int part, int shift, bool adds,
                                        uint8_t *to) {
  constexpr uint64_t kMask = (1 << kBits) - 1, kMasks = kMask * 0x0101010101010101;
  constexpr auto kStep = static_cast<int>(sizeof(Words));
#pragma GCC unroll 4
  for (int i = 0; i < kRun; i += kStep) {
    Words words, old{};
    memcpy(&words, from + i, sizeof words);
    if (adds) memcpy(&old, to + i, sizeof old);
    words = (words >> part & kMasks) << shift | old;
    memcpy(to + i, &words, sizeof words);
  }
}

// The blocks of a row, and the codes that they are unpacked to.
struct BlockRow {
  const uint8_t *blocks;
  int64_t count, block_bytes, block_codes;
  uint8_t *codes;
};

// Does unpack_plane for runs of kRun bytes, or of any size if that is 0.
template <int kBits, int kRun>
void unpack_runs(const tw_plane &plane, BlockRow row, bool adds) {
  constexpr int kMask = (1 << kBits) - 1;
  const int64_t bytes = plane.bytes, run = kRun ? kRun : plane.run;
  const int shift = plane.shift;
  row.blocks += plane.first;
  for (int64_t block = 0; block < row.count; block++) {
    uint8_t *to = row.codes;
    for (int64_t at = 0; at < bytes; at += run)
      for (int part = 0; part < 8; part += kBits, to += run) {
        if (kRun == 16) unpack_run<TwoWords, kBits, 16>(row.blocks + at, part, shift, adds, to);
        if (kRun > 16) unpack_run<FourWords, kBits, kRun>(row.blocks + at, part, shift, adds, to);
        if (kRun) continue;
        for (int64_t i = 0; i < run; i++) {
          const int bits = (row.blocks[at + i] >> part & kMask) << shift;
          to[i] = static_cast<uint8_t>(adds ? to[i] | bits : bits);
        }
      }
    row.blocks += row.block_bytes;
    row.codes += row.block_codes;
  }
}

template <int kBits>
void unpack_bits(const tw_plane &plane, const BlockRow &row, bool adds) {
  if (plane.run == 16) return unpack_runs<kBits, 16>(plane, row, adds);
  if (plane.run == 32) return unpack_runs<kBits, 32>(plane, row, adds);
  if (plane.run == 64) return unpack_runs<kBits, 64>(plane, row, adds);
  unpack_runs<kBits, 0>(plane, row, adds);
}

// Writes the halves of bytes, the lower one's first. Eight codes are in a word.
void unpack_halves(const uint8_t *from, int64_t count, uint8_t *to) {
  for (int64_t i = 0; i < count; i += 4) {
    uint64_t word = load_four(from + i);
    word = (word | word << 16) & 0x0000ffff0000ffff;
    word = (word | word << 8) & 0x00ff00ff00ff00ff;
    word = (word | word << 4) & 0x0f0f0f0f0f0f0f0f;
    memcpy(to + 2 * i, &word, sizeof word);
  }
}

// Writes the codes' bits of a plane in all blocks, or adds them to codes that have others.
void unpack_plane(const tw_plane &plane, const BlockRow &row, bool adds) {
  const bool is_whole = plane.run == 1 && plane.bits == 4 && plane.shift == 0 && !adds;
  if (is_whole && plane.bytes % 4 == 0) {
    for (int64_t block = 0; block < row.count; block++)
      unpack_halves(row.blocks + plane.first + block * row.block_bytes, plane.bytes,
                    row.codes + block * row.block_codes);
    return;
  }
  switch (plane.bits) {
    case 1:
      return unpack_bits<1>(plane, row, adds);
    case 2:
      return unpack_bits<2>(plane, row, adds);
    case 4:
      return unpack_bits<4>(plane, row, adds);
    default:
      return unpack_bits<8>(plane, row, adds);
  }
}

// Writes the `count` codes of a row of blocks.
void unpack_row(const tw_codes &c, const uint8_t *blocks, int64_t count, uint8_t *to) {
  const BlockRow row{blocks, count / c.block_codes, c.block_bytes, c.block_codes, to};
  for (const tw_plane *plane = c.planes; plane < c.planes + c.num_planes; plane++)
    unpack_plane(*plane, row, plane > c.planes);
  const auto lift = static_cast<uint8_t>(c.lift);
  for (int64_t i = 0; lift && i < count; i++) to[i] = static_cast<uint8_t>(to[i] + lift);
}

}  // namespace
