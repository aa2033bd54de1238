// Products with weights in groups of 4-, 6- or 8-bit codes. Codes of 4 bits may be indices into a
// table of 16 values. Rows are rounded to 8 bits on the way in, so that a product of codes is one
// of bytes. Outliers' products are added to it.
//
// Few rows are multiplied by weights as these are read. For more, weights are decoded to a panel.
#include "grouped.h"

#include <string.h>

#include "buffer.h"
#include "exponential.h"
#include "grouped_blocks.h"
#include "grouped_forms.h"
#include "grouped_layout.h"
#include "grouped_rows.h"
#include "grouped_sums.h"
#include "grouped_vectors.h"
#include "integers.h"
#include "outliers.h"
#include "scalars.h"
#include "threads.h"

namespace {

constexpr int64_t kRowsInCache = 64;  // rows whose codes stay in L2 while strips pass
constexpr int64_t kWidth = kStrips * kStrip;  // outputs that are multiplied at once

// Adds the products of kRows rows and a block to the totals. A row's total is independent of the
// number of rows, and of where the block is read from.
template <typename Form, int kRows, typename Block>
TW_INLINE void add_block(const Block &block, const RowBlock &rows, Vector (*totals)[kRows]) {
  Vector products[kStrips][kRows];
#pragma GCC unroll 2
  for (int part = 0; part < Form::kParts; part++) {
    Integers sums[kStrips][kRows];
    sum_products<Form>(block, rows, part, sums);
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; s++) {
      const Vector scale = block.scale(s, part);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        const Vector whole = to_float(sums[s][r]);
        products[s][r] = part ? fused(whole, scale, products[s][r]) : times(whole, scale);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++) {
    const Vector scale = broadcast(rows.scales[r]);
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; s++) totals[s][r] = fused(products[s][r], scale, totals[s][r]);
  }
  if (!Form::kOffsets) return;
#pragma GCC unroll 2
  for (int part = 0; part < Form::kParts; part++) {
    const Vector offsets[kStrips] = {block.offset(0, part), block.offset(1, part)};
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const Vector sum = broadcast(rows.sums[part * kRowsAtOnce + r]);
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; s++) totals[s][r] = fused(offsets[s], sum, totals[s][r]);
    }
  }
}

template <int kRows>
TW_INLINE void load_totals(const float *from, Vector (*totals)[kRows]) {
#pragma GCC unroll 2
  for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) totals[s][r] = load(from + r * kWidth + s * kStrip);
}

template <int kRows>
TW_INLINE void store_totals(Vector (*totals)[kRows], float *to) {
#pragma GCC unroll 2
  for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) store(to + r * kWidth + s * kStrip, totals[s][r]);
}

// Rows of one loop's item: `count` from `first` on, which is a multiple of kRowsAtOnce.
struct RowRange {
  const Rows &rows;
  int64_t first, count;
};

// Adds the products of kRows rows and two strips, `apart` bytes from each other, to `sums`:
// [kRows][kWidth].
template <typename Form, int kRows>
void multiply_packed(const tw_grouped &g, const uint8_t *packed, int64_t apart, const Rows &rows,
                     int64_t first, float *sums) {
  Vector totals[kStrips][kRows];
  load_totals(sums, totals);
  PackedBlocks<Form> blocks(g, packed, apart);
  RowBlock row(rows, first / kRowsAtOnce, 0);
  for (int64_t block = 0; block < rows.blocks; block++) {
    add_block<Form>(blocks.next(), row, totals);
    row.next<Form>();
  }
  store_totals(totals, sums);
}

#if defined(TW_HAS_VECTORS)

constexpr int64_t kPanelBlocks = 16;  // blocks whose decoded weights stay in the L1 cache

// Adds the products of four rows and some packed blocks to `sums`, and decodes the blocks to a panel.
template <typename Packed>
void multiply_decoded(PackedBlocks<Packed> &blocks, int64_t count, RowBlock row, uint8_t *panel,
                      float *sums) {
  using Panel = PanelForm<Packed>;
  Vector totals[kStrips][kRowsAtOnce];
  load_totals(sums, totals);
  for (int64_t block = 0; block < count; block++) {
    add_block<Panel>(DecodedBlock<Packed>{blocks.next(), panel}, row, totals);
    panel += PanelBlock<Panel>::kBytes;
    row.next<Panel>();
  }
  store_totals(totals, sums);
}

// Adds the products of kRows rows and the blocks of a panel to `sums`.
template <typename Form, int kRows>
void multiply_panel(const uint8_t *panel, int64_t blocks, RowBlock row, float *sums) {
  Vector totals[kStrips][kRows];
  load_totals(sums, totals);
  for (int64_t block = 0; block < blocks; block++) {
    add_block<Form>(PanelBlock<Form>{panel}, row, totals);
    panel += PanelBlock<Form>::kBytes;
    row.next<Form>();
  }
  store_totals(totals, sums);
}

// Does what multiply_packed does for more than four rows.
template <typename Packed>
void multiply_many(const tw_grouped &g, const uint8_t *packed, int64_t apart, const RowRange &range,
                   float *sums) {
  using Panel = PanelForm<Packed>;
  constexpr decltype(&multiply_panel<Panel, 1>) kKernels[] = {
      multiply_panel<Panel, 1>, multiply_panel<Panel, 2>, multiply_panel<Panel, 3>,
      multiply_panel<Panel, 4>};
  alignas(64) uint8_t panel[kPanelBlocks * PanelBlock<Panel>::kBytes];
  PackedBlocks<Packed> blocks(g, packed, apart);
  for (int64_t first = 0; first < range.rows.blocks; first += kPanelBlocks) {
    const int64_t count = smaller(kPanelBlocks, range.rows.blocks - first);
    multiply_decoded<Packed>(blocks, count, RowBlock(range.rows, range.first / kRowsAtOnce, first),
                             panel, sums);
    for (int64_t row = kRowsAtOnce; row < range.count; row += kRowsAtOnce) {
      const RowBlock at(range.rows, (range.first + row) / kRowsAtOnce, first);
      kKernels[smaller(kRowsAtOnce, range.count - row) - 1](panel, count, at, sums + row * kWidth);
    }
  }
}

#endif

// Adds the products of a row's outliers and a strip. out: [kStrip].
template <typename Form>
void add_outliers(const tw_grouped &g, const uint8_t *packed, const Rows &rows, int64_t row,
                  float *out) {
  const int64_t group_bytes = Form::kNumberBytes + g.group * kStrip * bits_of(Form::kCoding) / 8;
  const Outlier *at = rows.outliers + row * rows.blocks;
  Vector sum = load(out);
  for (const Outlier *last = at + rows.counts[row]; at < last; at++) {
    const int64_t group = at->input / g.group, super = at->input / kSuper;
    const uint8_t *factors = packed + super * (kSuper / g.group * group_bytes + Form::kFactorBytes);
    const uint8_t *numbers = packed + group * group_bytes + (super + 1) * Form::kFactorBytes;
    Vector code = load_input<Form::kCoding>(g, numbers + Form::kNumberBytes, at->input % g.group);
    if (!Form::kSigned && !Form::kOffsets) code = less(code, broadcast(zero_of(Form::kCoding)));
    Vector weight = times(code, load_numbers<Form::kNumbers>(numbers, factors));
    if (Form::kOffsets)
      weight = plus(weight,
                    load_numbers<Form::kNumbers>(numbers + Form::kEach, factors + kStrip * 2));
    sum = fused(weight, broadcast(at->value), sum);
  }
  store(out, sum);
}

// Multiplies some rows by two strips. sums: [rows][kWidth].
template <typename Form>
void multiply_strips(const tw_grouped &g, const uint8_t *packed, int64_t apart,
                     const RowRange &range, float *sums) {
  constexpr decltype(&multiply_packed<Form, 1>) kKernels[] = {
      multiply_packed<Form, 1>, multiply_packed<Form, 2>, multiply_packed<Form, 3>,
      multiply_packed<Form, 4>};
  memset(sums, 0, static_cast<size_t>(range.count * kWidth) * sizeof *sums);
#if defined(TW_HAS_VECTORS)
  if (range.count > kRowsAtOnce)
    multiply_many<Form>(g, packed, apart, range, sums);
  else
#endif
    for (int64_t row = 0; row < range.count; row += kRowsAtOnce)
      kKernels[smaller(kRowsAtOnce, range.count - row) - 1](g, packed, apart, range.rows,
                                                            range.first + row, sums + row * kWidth);
  for (int64_t row = 0; row < range.count; row++) {
    if (!range.rows.counts[range.first + row]) continue;
    for (int s = 0; s < kStrips; s++)
      add_outliers<Form>(g, packed + s * apart, range.rows, range.first + row,
                         sums + row * kWidth + s * kStrip);
  }
}

using MultiplyStrips = decltype(&multiply_strips<Form<4, 32, TW_FLOATS, false>>);

template <int kCoding, int kGroup, int kNumbers>
MultiplyStrips choose_offsets(const tw_grouped &g) {
  return g.has_offsets ? multiply_strips<Form<kCoding, kGroup, kNumbers, kCoding != kValues>>
                       : multiply_strips<Form<kCoding, kGroup, kNumbers, false>>;
}

template <int kCoding, int kGroup>
MultiplyStrips choose_numbers(const tw_grouped &g) {
  constexpr int kExponents = kCoding == kValues ? TW_EXPONENTS : TW_FLOATS;
  if (g.numbers == TW_EXPONENTS) return choose_offsets<kCoding, kGroup, kExponents>(g);
  if (g.numbers == TW_LEVELS) return choose_offsets<kCoding, kGroup, TW_LEVELS>(g);
  return g.numbers == TW_HALVES ? choose_offsets<kCoding, kGroup, TW_HALVES>(g)
                                : choose_offsets<kCoding, kGroup, TW_FLOATS>(g);
}

template <int kCoding>
MultiplyStrips choose_group(const tw_grouped &g) {
  return g.group < kBlock ? choose_numbers<kCoding, kBlock / 2>(g)
                          : choose_numbers<kCoding, kBlock>(g);
}

MultiplyStrips choose(const tw_grouped &g) {
  if (g.has_values) return choose_group<kValues>(g);
  if (g.bits == 4) return choose_group<4>(g);
  return g.bits == 6 ? choose_group<6>(g) : choose_group<8>(g);
}

// Returns the packed weights of some strips; mapped ones until the thread's next call.
const uint8_t *strips_of(const tw_grouped &g, int64_t first, int64_t count) {
  static thread_local Buffer memory;
  const int64_t bytes = strip_bytes(g);
  if (!g.mapped) return static_cast<const uint8_t *>(g.packed) + (g.first_strip + first) * bytes;
  auto *packed = static_cast<uint8_t *>(memory.reserve(count * bytes));
  tw_pack_mapped(&g, first, count, packed);
  return packed;
}

// Writes some of a row's outputs.
template <typename T>
void write_row(const tw_grouped &g, const float *sums, int64_t row, int64_t output, int64_t count) {
  T *to = static_cast<T *>(g.out) + row * g.out_stride + output;
  for (int64_t i = 0; i < count; i++) {
    const float value = sums[i] + (g.bias ? g.bias[output + i] : 0.0f);
    store(to + i, g.adds ? load(to[i]) + value : value);
  }
}

// Writes a whole strip of a row's outputs.
inline void write_strip(const tw_grouped &g, const float *sums, int64_t row, int64_t output) {
  float *to = static_cast<float *>(g.out) + row * g.out_stride + output;
  Vector values = load(sums);
  if (g.bias) values = plus(values, load(g.bias + output));
  store(to, g.adds ? plus(load(to), values) : values);
}

void write(const tw_grouped &g, const float *sums, int64_t row, int64_t output) {
  const int64_t count = minimum(kWidth, g.outputs - output);
  if (g.out_dtype != TW_FLOAT32) return write_row<bfloat16>(g, sums, row, output, count);
  if (count < kWidth) return write_row<float>(g, sums, row, output, count);
  for (int64_t i = 0; i < kWidth; i += kStrip) write_strip(g, sums + i, row, output + i);
}

}  // namespace

void TW_GROUPED(const tw_grouped *call) {
  const tw_grouped g = *call;
  const Rows rows = round_rows(g);
  const MultiplyStrips multiply = choose(g);
  const int64_t strips = divide_up(g.outputs, kStrip), bytes = strip_bytes(g);
  const int64_t pairs = divide_up(strips, kStrips);
  const int64_t at_once = kStrips * larger(pairs / (8 * num_threads()), 1);
  const int64_t ranges = divide_up(strips, at_once);
  const int64_t row_blocks = divide_up(g.num_rows, kRowsInCache);
  parallel_for(ranges * row_blocks, [&](int64_t item) {
    const int64_t first = item / ranges * kRowsInCache;
    const RowRange range{rows, first, smaller(kRowsInCache, g.num_rows - first)};
    const int64_t begin = item % ranges * at_once, end = smaller(begin + at_once, strips);
    for (int64_t strip = begin; strip < end; strip += kStrips) {
      const uint8_t *packed = strips_of(g, strip, smaller(kStrips, end - strip));
      // The last strip may be alone: it is multiplied twice.
      const int64_t apart = strip + 1 < end ? bytes : 0;
      alignas(32) float sums[kRowsInCache * kWidth];
      multiply(g, packed, apart, range, sums);
      for (int64_t row = 0; row < range.count; row++)
        write(g, sums + row * kWidth, first + row, strip * kStrip);
    }
  });
}
