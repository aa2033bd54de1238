// Weights in the blocks of a mapped file. A few strips are packed (grouped_layout.h) into memory that
// stays in the caches just before they are multiplied, so products equal those of packed weights.
#include "mapped.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif
#include <string.h>

#include "buffer.h"
#include "grouped_units.h"

namespace {

constexpr int64_t kMostGroups = 16;  // of a block
constexpr int64_t kNumberBytes = kStrip * 4;
constexpr int64_t kTogether = 4;  // blocks of one group

// The numbers of a block's groups.
struct BlockNumbers {
  float scales[kMostGroups], offsets[kMostGroups];
};

inline float load_half(const uint8_t *from) {
  uint16_t half;
  memcpy(&half, from, sizeof half);
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  return half_to_float(half);
#endif
}

// Sets numbers to a factor times levels.
template <int kCount, typename Level>
inline void set(float factor, const Level *levels, float *to) {
  for (int i = 0; i < kCount; i++) to[i] = factor * static_cast<float>(levels[i]);
}

inline void read_q2_k(const uint8_t *from, float *scales, float *offsets) {
  uint8_t low[16], high[16];
  for (int i = 0; i < 16; i++) {
    low[i] = from[i] & 15;
    high[i] = from[i] >> 4;
  }
  set<16>(load_half(from + 80), low, scales);
  set<16>(-load_half(from + 82), high, offsets);
}

inline void read_q3_k(const uint8_t *from, float *scales) {
  const uint8_t *low = from + 96, *high = from + 104;
  int8_t levels[16];
  for (int i = 0; i < 16; i++) {
    const int level = (i < 8 ? low[i] & 15 : low[i - 8] >> 4) | (high[i % 4] >> i / 4 * 2 & 3) << 4;
    levels[i] = static_cast<int8_t>(level - 32);
  }
  set<16>(load_half(from + 108), levels, scales);
}

inline void read_q4_k(const uint8_t *from, float *scales, float *offsets) {
  constexpr uint32_t kSix = 0x3f3f3f3f, kFour = 0x0f0f0f0f, kTwo = 0x03030303;
  uint32_t words[3];  // of four levels each
  memcpy(words, from + 4, sizeof words);
  const uint32_t sorted[4] = {words[0] & kSix, (words[2] & kFour) | (words[0] >> 6 & kTwo) << 4,
                              words[1] & kSix,
                              (words[2] >> 4 & kFour) | (words[1] >> 6 & kTwo) << 4};
  uint8_t levels[16];
  memcpy(levels, sorted, sizeof levels);
  set<8>(load_half(from), levels, scales);
  set<8>(-load_half(from + 2), levels + 8, offsets);
}

inline void read_q6_k(const uint8_t *from, float *scales) {
  int8_t levels[16];
  memcpy(levels, from + 192, sizeof levels);
  set<16>(load_half(from + 208), levels, scales);
}

inline void read_iq4_xs(const uint8_t *from, float *scales) {
  int8_t levels[8];
  for (int i = 0; i < 8; i++) {
    const int low = from[4 + i / 2] >> i % 2 * 4 & 15, high = from[2 + i / 4] >> i % 4 * 2 & 3;
    levels[i] = static_cast<int8_t>((low | high << 4) - 32);
  }
  set<8>(load_half(from), levels, scales);
}

inline void read_exponent(const uint8_t *from, float *scales) {
  const uint32_t bits = (from[0] ? from[0] - 1u : 0u) << 23;
  memcpy(scales, &bits, sizeof bits);
}

inline void read_numbers(int32_t form, const uint8_t *from, float *scales, float *offsets) {
  switch (form) {
    case TW_SCALE_AND_OFFSET_NUMBERS:
      offsets[0] = load_half(from + 2);
      [[fallthrough]];
    case TW_SCALE_NUMBERS:
      scales[0] = load_half(from);
      return;
    case TW_Q2_K_NUMBERS:
      return read_q2_k(from, scales, offsets);
    case TW_Q3_K_NUMBERS:
      return read_q3_k(from, scales);
    case TW_Q4_K_NUMBERS:
      return read_q4_k(from, scales, offsets);
    case TW_Q6_K_NUMBERS:
      return read_q6_k(from, scales);
    case TW_IQ4_XS_NUMBERS:
      return read_iq4_xs(from, scales);
    default:
      return read_exponent(from, scales);
  }
}

// Writes `count` numbers of each output, `stride` floats apart, to places that are `apart` bytes.
inline void transpose(const float *from, int64_t stride, int64_t count, float factor,
                      int64_t apart, uint8_t *to) {
  int64_t at = 0;
#if defined(__AVX2__)
  for (; at + 4 <= count; at += 4, to += 4 * apart) {
    __m128i rows[kStrip];
    for (int64_t output = 0; output < kStrip; output++)
      rows[output] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + output * stride + at));
    const Columns columns(rows);
    for (int i = 0; i < 4; i++)
      _mm256_storeu_ps(reinterpret_cast<float *>(to + i * apart),
                       _mm256_mul_ps(_mm256_castsi256_ps(columns.each[i]), _mm256_set1_ps(factor)));
  }
#endif
  for (; at < count; at++, to += apart)
    for (int64_t output = 0; output < kStrip; output++) {
      const float number = from[output * stride + at] * factor;
      memcpy(to + output * 4, &number, sizeof number);
    }
}

// Writes the numbers of a strip. rows: of each output; those without one are zeros.
void pack_numbers(const tw_grouped &g, const tw_blocks &weight, const int64_t *rows, int64_t outputs,
                  uint8_t *to) {
  constexpr auto kStride = static_cast<int64_t>(sizeof(BlockNumbers) / sizeof(float));
  const int64_t kinds = g.has_offsets ? 2 : 1, groups = weight.codes.block_codes / g.group;
  const int64_t apart = kNumberBytes * kinds + g.group * kStrip * g.bits / 8;
  const int64_t blocks = g.inputs / weight.codes.block_codes;
  const int64_t at_once = groups == 1 && blocks % kTogether == 0 ? kTogether : 1;
  const uint8_t *from[kStrip];
  for (int64_t i = 0; i < outputs; i++) from[i] = weight.numbers + rows[i] * weight.number_row_bytes;
  BlockNumbers numbers[kStrip] = {};
  for (int64_t block = 0; block < blocks; block += at_once) {
    for (int64_t i = 0; i < outputs; i++)
      for (int64_t each = 0; each < at_once; each++) {
        read_numbers(weight.form, from[i], numbers[i].scales + each, numbers[i].offsets + each);
        from[i] += weight.number_block_bytes;
      }
    transpose(numbers->scales, kStride, groups * at_once, weight.factor, apart, to);
    if (g.has_offsets)
      transpose(numbers->offsets, kStride, groups * at_once, weight.factor, apart,
                to + kNumberBytes);
    to += groups * at_once * apart;
  }
}

// Writes the codes of a strip.
template <int kBits>
void pack_codes(const tw_grouped &g, const uint8_t *const *rows, int64_t outputs, uint8_t *to) {
  const int64_t unit = minimum(g.group, kBlock), gap = kNumberBytes * (g.has_offsets ? 2 : 1);
  for (int64_t first = 0; first < g.inputs; first += g.group) {
    to += gap;
#if defined(__AVX2__)
    if (outputs == kStrip) {
      for (int64_t input = 0; input < g.group; input += 16, to += 2 * kStrip * kBits)
        pack_half_unit<kBits>(rows, first + input, to);
      continue;
    }
#endif
    for (int64_t input = 0; input < g.group; input += unit, to += unit * kStrip * kBits / 8)
      pack_unit(g, rows, first + input, outputs, to);
  }
}

// Packs the outputs of a weight from `first` on, at most a strip; zeros where they end.
void pack_strip(const tw_grouped &g, const tw_blocks &weight, int64_t first, uint8_t *to) {
  static thread_local Buffer memory;
  const int64_t outputs = minimum(kStrip, weight.outputs - first);
  if (outputs < kStrip) memset(to, 0, static_cast<size_t>(strip_bytes(g)));
  auto *codes = static_cast<uint8_t *>(memory.reserve(kStrip * g.inputs));
  const uint8_t *unpacked[kStrip];
  int64_t rows[kStrip];
  for (int64_t i = 0; i < outputs; i++) {
    rows[i] = weight.codes.order ? weight.codes.order[first + i] : first + i;
    unpacked[i] = codes + i * g.inputs;
    unpack_row(weight.codes, weight.codes.rows + rows[i] * weight.codes.row_bytes, g.inputs,
               codes + i * g.inputs);
  }
  pack_numbers(g, weight, rows, outputs, to);
  if (g.bits == 4) return pack_codes<4>(g, unpacked, outputs, to);
  g.bits == 6 ? pack_codes<6>(g, unpacked, outputs, to) : pack_codes<8>(g, unpacked, outputs, to);
}

}  // namespace

void TW_MAPPED(const tw_grouped *call, int64_t first, int64_t count, uint8_t *packed) {
  const tw_grouped g = *call;
  const tw_mapped &all = *g.mapped;
  const int64_t bytes = strip_bytes(g);
  for (int64_t strip = g.first_strip + first; count > 0; strip++, count--, packed += bytes) {
    const tw_blocks *weight = all.weights;
    int64_t own = strip;  // of the weight
    if (all.alternate) {
      const int64_t tile = strip / kTileStrips;
      weight += tile % all.count;
      own = tile / all.count * kTileStrips + strip % kTileStrips;
    } else {
      for (; weight + 1 < all.weights + all.count && own * kStrip >= weight->outputs; weight++)
        own -= weight->outputs / kStrip;
    }
    if (own * kStrip < weight->outputs)
      pack_strip(g, *weight, own * kStrip, packed);
    else
      memset(packed, 0, static_cast<size_t>(bytes));
  }
}
