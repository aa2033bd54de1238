// Packing of weights in groups (grouped_layout.h).
#include <string.h>

#include "buffer.h"
#include "exponential.h"
#include "grouped_layout.h"
#include "threads.h"

namespace {

inline uint32_t load_four(const uint8_t *codes) {
  uint32_t four;
  memcpy(&four, codes, sizeof four);
  return four;
}

inline void store_four(uint32_t four, uint8_t *to) { memcpy(to, &four, sizeof four); }

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

// Copies number `at` of `count` of each of a strip's outputs; returns the place after them.
template <typename T>
uint8_t *pack_numbers(const void *numbers, int64_t first, int64_t outputs, int64_t count, int64_t at,
                      uint8_t *to) {
  const T *from = static_cast<const T *>(numbers) + first * count + at;
  for (int64_t output = 0; output < outputs; output++)
    memcpy(to + output * static_cast<int64_t>(sizeof(T)), from + output * count, sizeof(T));
  return to + kStrip * static_cast<int64_t>(sizeof(T));
}

// Writes bits, or adds them to codes that have others. Eight codes are in a word.
template <int kBits>
void unpack_bits(const tw_plane &plane, const uint8_t *from, bool adds, uint8_t *to) {
  constexpr uint64_t kMask = (1 << kBits) - 1, kMasks = kMask * 0x0101010101010101;
  for (int64_t at = 0; at < plane.bytes; at += plane.run)
    for (int part = 0; part < 8; part += kBits, to += plane.run) {
      int64_t i = 0;
      for (; i + 8 <= plane.run; i += 8) {
        uint64_t word, old = 0;
        memcpy(&word, from + at + i, sizeof word);
        if (adds) memcpy(&old, to + i, sizeof old);
        word = (word >> part & kMasks) << plane.shift | old;
        memcpy(to + i, &word, sizeof word);
      }
      for (; i < plane.run; i++) {
        uint64_t bits = (from[at + i] >> part & kMask) << plane.shift;
        to[i] = static_cast<uint8_t>(adds ? to[i] | bits : bits);
      }
    }
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

void unpack_plane(const tw_plane &plane, const uint8_t *from, bool adds, uint8_t *to) {
  const bool is_whole = plane.run == 1 && plane.bits == 4 && plane.shift == 0 && !adds;
  if (is_whole && plane.bytes % 4 == 0) return unpack_halves(from, plane.bytes, to);
  switch (plane.bits) {
    case 1:
      return unpack_bits<1>(plane, from, adds, to);
    case 2:
      return unpack_bits<2>(plane, from, adds, to);
    case 4:
      return unpack_bits<4>(plane, from, adds, to);
    default:
      return unpack_bits<8>(plane, from, adds, to);
  }
}

// Writes the `count` codes of a row of blocks.
void unpack_row(const tw_codes &c, const uint8_t *blocks, int64_t count, uint8_t *to) {
  for (int64_t b = 0; b < count / c.block_codes; b++)
    for (const tw_plane *plane = c.planes; plane < c.planes + c.num_planes; plane++)
      unpack_plane(*plane, blocks + b * c.block_bytes + plane->first, plane > c.planes,
                   to + b * c.block_codes);
  for (int64_t i = 0; c.values && i < count; i++) to[i] = c.values[to[i]];
}

}  // namespace

int64_t tw_grouped_bytes(const tw_grouped *call) {
  return (call->outputs + kStrip - 1) / kStrip * strip_bytes(*call);
}

void tw_grouped_pack(const tw_grouped *call, const tw_codes *all_codes, const tw_numbers *scales,
                     const tw_numbers *offsets, uint8_t *packed, int64_t first_tile,
                     int64_t tile_step) {
  const tw_grouped g = *call;
  const tw_codes codes = *all_codes;
  const tw_numbers numbers[] = {*scales, g.has_offsets ? *offsets : tw_numbers{}};
  const int64_t kinds = g.has_offsets ? 2 : 1, groups = g.inputs / g.group;
  const auto pack = g.numbers == TW_FLOATS   ? pack_numbers<float>
                    : g.numbers == TW_HALVES ? pack_numbers<uint16_t>
                                             : pack_numbers<uint8_t>;
  const int64_t strips = (g.outputs + kStrip - 1) / kStrip, unit = minimum(g.group, kBlock);
  parallel_for(strips, [&](int64_t strip) {
    static thread_local Buffer memory;
    int64_t first = strip * kStrip, outputs = minimum(kStrip, g.outputs - first);
    const uint8_t *rows[kStrip];
    for (int64_t i = 0; i < outputs; i++) {
      int64_t row = codes.order ? codes.order[first + i] : first + i;
      rows[i] = codes.rows + row * codes.row_bytes;
    }
    if (codes.planes) {
      uint8_t *unpacked = static_cast<uint8_t *>(memory.reserve(kStrip * g.inputs));
      for (int64_t i = 0; i < outputs; i++) {
        unpack_row(codes, rows[i], g.inputs, unpacked + i * g.inputs);
        rows[i] = unpacked + i * g.inputs;
      }
    }
    int64_t tile = first_tile + strip / kTileStrips * tile_step;
    uint8_t *to = packed + (tile * kTileStrips + strip % kTileStrips) * strip_bytes(g);
    if (outputs < kStrip) memset(to, 0, static_cast<size_t>(strip_bytes(g)));
    for (int64_t group = 0; group < groups; group++) {
      int64_t input = group * g.group;
      if (g.numbers == TW_LEVELS && input % kSuper == 0)
        for (int64_t kind = 0; kind < kinds; kind++)
          to = pack_numbers<uint16_t>(numbers[kind].factors, first, outputs, g.inputs / kSuper,
                                      input / kSuper, to);
      for (int64_t kind = 0; kind < kinds; kind++)
        to = pack(numbers[kind].each, first, outputs, groups, group, to);
      for (int64_t end = input + g.group; input < end; input += unit) {
        pack_unit(g, rows, input, outputs, to);
        to += unit * kStrip * g.bits / 8;
      }
    }
  });
}
