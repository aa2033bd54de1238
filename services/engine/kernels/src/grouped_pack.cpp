// Packing of weights in groups (grouped_layout.h).
#include <string.h>

#include "exponential.h"
#include "grouped_layout.h"
#include "threads.h"

namespace {

// Writes the codes of a unit; codes: those of its first output and input.
void pack_unit(const tw_grouped &g, const uint8_t *codes, int64_t outputs, uint8_t *to) {
  int64_t unit = minimum(g.group, kBlock);
  for (int64_t output = 0; output < outputs; output++) {
    const uint8_t *from = codes + output * g.inputs;
    for (int64_t input = 0; input < unit; input++) {
      if (g.bits == 8)
        to[byte_at(output, input)] = from[input];
      else if (input / 4 % 2)
        to[nibble_at(output, input)] |= static_cast<uint8_t>(from[input] << 4);
      else
        to[nibble_at(output, input)] |= from[input];
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
