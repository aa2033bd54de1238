// Packing of weights in groups (grouped_layout.h).
#include <string.h>

#include "exponential.h"
#include "grouped_layout.h"
#include "threads.h"

namespace {

inline uint32_t load_four(const uint8_t *codes) {
  uint32_t four;
  memcpy(&four, codes, sizeof four);
  return four;
}

// Writes the codes of a unit; codes: those of its first output and input.
void pack_unit(const tw_grouped &g, const uint8_t *codes, int64_t outputs, uint8_t *to) {
  int64_t unit = minimum(g.group, kBlock), step = g.bits == 8 ? 4 : 8;
  for (int64_t output = 0; output < outputs; output++) {
    const uint8_t *from = codes + output * g.inputs;
    for (int64_t input = 0; input < unit; input += step) {
      uint32_t four = load_four(from + input);
      if (g.bits == 4) four |= load_four(from + input + 4) << 4;
      memcpy(to + (g.bits == 8 ? byte_at(output, input) : nibble_at(output, input)), &four, 4);
    }
  }
}

void pack_numbers(const tw_grouped &g, const void *numbers, int64_t first, int64_t outputs,
                  int64_t group, uint8_t *to) {
  int64_t groups = g.inputs / g.group, size = g.has_halves ? 2 : 4;
  for (int64_t output = 0; output < outputs; output++) {
    int64_t from = ((first + output) * groups + group) * size;
    memcpy(to + output * size, static_cast<const uint8_t *>(numbers) + from,
           static_cast<size_t>(size));
  }
}

}  // namespace

void tw_split_bytes(const uint8_t *blocks, int64_t count, int64_t block_bytes, int64_t first,
                    int64_t run, uint8_t *halves) {
  constexpr int64_t kBlocks = 1024;  // of a loop's item
  parallel_for((count + kBlocks - 1) / kBlocks, [=](int64_t item) {
    for (int64_t b = item * kBlocks; b < minimum((item + 1) * kBlocks, count); b++) {
      const uint8_t *from = blocks + b * block_bytes + first;
      uint8_t *to = halves + b * 2 * (block_bytes - first);
      for (int64_t at = 0; at < block_bytes - first; at += run) {
        for (int64_t i = 0; i < run; i++) to[2 * at + i] = from[at + i] & 15;
        for (int64_t i = 0; i < run; i++) to[2 * at + run + i] = from[at + i] >> 4;
      }
    }
  });
}

int64_t tw_grouped_bytes(const tw_grouped *call) {
  return (call->outputs + kStrip - 1) / kStrip * strip_bytes(*call);
}

void tw_grouped_pack(const tw_grouped *call, const uint8_t *codes, const void *scales,
                     const void *offsets, uint8_t *packed) {
  const tw_grouped g = *call;
  int64_t strips = (g.outputs + kStrip - 1) / kStrip, unit = minimum(g.group, kBlock);
  int64_t numbers = kStrip * (g.has_halves ? 2 : 4);
  parallel_for(strips, [&](int64_t strip) {
    int64_t first = strip * kStrip, outputs = minimum(kStrip, g.outputs - first);
    uint8_t *to = packed + strip * strip_bytes(g);
    memset(to, 0, static_cast<size_t>(strip_bytes(g)));
    for (int64_t group = 0; group < g.inputs / g.group; group++) {
      pack_numbers(g, scales, first, outputs, group, to);
      to += numbers;
      if (g.has_offsets) {
        pack_numbers(g, offsets, first, outputs, group, to);
        to += numbers;
      }
      for (int64_t input = 0; input < g.group; input += unit) {
        pack_unit(g, codes + first * g.inputs + group * g.group + input, outputs, to);
        to += unit * kStrip * g.bits / 8;
      }
    }
  });
}
