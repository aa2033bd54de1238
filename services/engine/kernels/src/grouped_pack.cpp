// Packing of weights in groups (grouped_layout.h).
#include <string.h>

#include "buffer.h"
#include "grouped_layout.h"
#include "grouped_units.h"
#include "threads.h"

namespace {

// Copies number `at` of `count` of each of a strip's outputs; returns the place after them.
template <typename T>
uint8_t *pack_numbers(const void *numbers, int64_t first, int64_t outputs, int64_t count, int64_t at,
                      uint8_t *to) {
  const T *from = static_cast<const T *>(numbers) + first * count + at;
  for (int64_t output = 0; output < outputs; output++)
    memcpy(to + output * static_cast<int64_t>(sizeof(T)), from + output * count, sizeof(T));
  return to + kStrip * static_cast<int64_t>(sizeof(T));
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
