// Linear layers with weights in groups, on rows in tiles, on AVX-512 VNNI. Rows are rounded to 8 bits
// on the way in, so that a product of codes is one of bytes. Outliers' products are added to it.
#include "byte_products.h"
#include "grouped_codes.h"
#include "product.h"
#include "rounded_rows.h"
#include "tiled.h"

namespace {

constexpr int64_t kPartSteps = 16;                      // steps whose codes stay in the L1 cache
constexpr int64_t kMostElements = 1 << 20;              // of the rows that stay in the L2 cache
constexpr int64_t kStepCodes = kTileRows * kTileInner;  // of a tile
constexpr int64_t kFewRows = 8;
constexpr int64_t kRowsAtOnce = 4;  // of many

// Steps of a tile's 16 outputs, a byte for each code.
struct alignas(64) TilePart {
  uint8_t codes[kPartSteps * kStepCodes];     // by four inputs
  float scales[kPartSteps * 2 * kTileRows];   // for each unit: a step, or half of it
  float offsets[kPartSteps * 2 * kTileRows];  // to add for each input of a unit
};

// Reads steps of a tile.
template <int kCoding>
void read_part(const Codes &all, const Strips &both, int64_t step, int64_t steps, TilePart &part) {
  const Codes codes = all;  // copies, because for the compiler a store to `part` may change them
  const Strips strips = both;
  for (int64_t half = 0; half < 2 * steps; half++) {
    const Codes::Place at = codes.place<kCoding>(step * kTileInner + half * kHalf);
    for (int64_t line = 0; line < kHalf * bits_of(kCoding); line += kLine)
      codes.fetch(strips, at.codes + line);
    if (codes.has_halves() || half % 2 == 0) {
      const TileNumbers numbers = codes.numbers<kCoding>(strips, at);
      const int64_t unit = codes.has_halves() ? half : half / 2;
      _mm512_store_ps(part.scales + unit * kTileRows, numbers.scale);
      _mm512_store_ps(part.offsets + unit * kTileRows, numbers.offset);
    }
    uint8_t *to = part.codes + half * (kHalf * kTileRows);
    codes.expand_at<kCoding>(strips, at.codes, [&](int four, __m512i bytes) TW_ALWAYS_INLINE {
      _mm512_store_si512(to + four * kLine, bytes);
    });
  }
}

// A strip of 16 rows from some step on.
struct StripRows {
  const int8_t *codes;
  const float *scales;  // by step
  const float *sums;    // by unit
  const int32_t *starts;

  StripRows(const RoundedRows &rows, int64_t row, int64_t step, int64_t depth) {
    const int64_t first = row / kTileRows * depth + step, within = row % kTileRows;
    const int64_t unit = first * (rows.halves ? 2 : 1);
    codes = rows.codes + first * kStepCodes + within * kTileInner;
    scales = rows.scales + first * kTileRows + within;
    sums = rows.sums + unit * kTileRows + within;
    starts = rows.starts + unit * kTileRows + within;
  }

  template <int kHalves>
  const int8_t *codes_of(int64_t unit) const {
    return codes + unit / kHalves * kStepCodes + unit % kHalves * kHalf;
  }
};

// Adds a unit's products to the totals of rows. whole(r): those of row r, as integers.
template <int kRows, int kHalves, bool kOffsets, typename Whole>
TW_ALWAYS_INLINE inline void add_unit(const StripRows &rows, int64_t unit,
                                      const TileNumbers &numbers, const Whole &whole,
                                      __m512 *totals) {
  const float *scales = rows.scales + unit / kHalves * kTileRows;
  const float *sums = rows.sums + unit * kTileRows;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(whole(r)), _mm512_set1_ps(scales[r]));
    totals[r] = _mm512_fmadd_ps(product, numbers.scale, totals[r]);
    if (kOffsets) totals[r] = _mm512_fmadd_ps(numbers.offset, _mm512_set1_ps(sums[r]), totals[r]);
  }
}

// Sets sums of codes to what makes those without a sign equal to those with one.
template <int kRows, bool kOffsets>
TW_ALWAYS_INLINE inline void begin_sums(const StripRows &rows, int64_t unit, __m512i *sums) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
    sums[r] = kOffsets ? _mm512_setzero_si512()
                       : _mm512_set1_epi32(rows.starts[unit * kTileRows + r]);
}

// Multiplies few rows by a tile, as it is read. out: [kRows] with kPair columns.
template <int kRows, int kCoding, int kHalves, bool kOffsets>
void multiply_few(const Codes &codes, const Strips &strips, const StripRows &rows, int64_t depth,
                  float *out) {
  __m512 totals[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) totals[r] = _mm512_setzero_ps();
  for (int64_t unit = 0; unit < depth * kHalves; unit++) {
    const Codes::Place at = codes.place<kCoding>(unit * kTileInner / kHalves);
    for (int64_t line = 0; line < kTileInner / kHalves * bits_of(kCoding); line += kLine)
      codes.fetch(strips, at.codes + line);
    const int8_t *inputs = rows.codes_of<kHalves>(unit);
    __m512i sums[kRows];
    begin_sums<kRows, kOffsets>(rows, unit, sums);
#pragma GCC unroll 2
    for (int half = 0; half < 2 / kHalves; half++)
      codes.expand_at<kCoding>(strips, at.codes + half * kHalf * bits_of(kCoding),
                               [&](int four, __m512i weights) TW_ALWAYS_INLINE {
                                 multiply_four<kRows, kTileInner>(
                                     inputs + half * kHalf + 4 * four, weights, sums);
                               });
    add_unit<kRows, kHalves, kOffsets>(
        rows, unit, codes.numbers<kCoding>(strips, at),
        [&](int r) TW_ALWAYS_INLINE { return sums[r]; }, totals);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) _mm512_store_ps(out + r * kPair, totals[r]);
}

inline TileNumbers numbers_of(const TilePart &part, int64_t unit) {
  return {_mm512_load_ps(part.scales + unit * kTileRows),
          _mm512_load_ps(part.offsets + unit * kTileRows)};
}

// Multiplies rows by the steps of two tiles, and adds the products to `sums`: [kRows] with kPair
// columns.
template <int kRows, int kHalves, bool kOffsets>
void multiply_parts(const StripRows &rows, const TilePart *parts, int64_t steps, float *sums) {
  constexpr int64_t kUnitCodes = kStepCodes / kHalves, kUnit = kTileInner / kHalves;
  __m512 totals[2 * kRows];
#pragma GCC unroll 2
  for (int tile = 0; tile < 2; tile++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++)
      totals[tile * kRows + r] = _mm512_load_ps(sums + r * kPair + tile * kTileRows);
  for (int64_t unit = 0; unit < steps * kHalves; unit++) {
    const int8_t *inputs = rows.codes_of<kHalves>(unit);
    const uint8_t *left = parts[0].codes + unit * kUnitCodes;
    const uint8_t *right = parts[1].codes + unit * kUnitCodes;
    __m512i whole[2 * kRows];
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; tile++)
      begin_sums<kRows, kOffsets>(rows, unit, whole + tile * kRows);
#pragma GCC unroll 8
    for (int four = 0; four < kUnit / 4; four++)
      multiply_four<kRows, kTileInner>(inputs + 4 * four, _mm512_load_si512(left + four * kLine),
                                       _mm512_load_si512(right + four * kLine), whole);
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; tile++)
      add_unit<kRows, kHalves, kOffsets>(
          rows, unit, numbers_of(parts[tile], unit),
          [&](int r) TW_ALWAYS_INLINE { return whole[tile * kRows + r]; }, totals + tile * kRows);
  }
#pragma GCC unroll 2
  for (int tile = 0; tile < 2; tile++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++)
      _mm512_store_ps(sums + r * kPair + tile * kTileRows, totals[tile * kRows + r]);
}

// Adds the products of outliers of some rows and a tile. out: [count] with kPair columns.
template <int kCoding>
void add_outliers(const Codes &codes, const Strips &strips, const RoundedRows &rows, int64_t depth,
                  int64_t row, int64_t count, float *out) {
  const int64_t end = row + count;
  for (int64_t strip = row / kTileRows; strip * kTileRows < end; strip++) {
    const Outlier *at = rows.outliers + strip * depth * kTileRows;
    __m512 column = _mm512_setzero_ps();
    int64_t input = -1;
    for (const Outlier *last = at + rows.counts[strip]; at < last; at++) {
      if (at->row < row || at->row >= end) continue;
      if (at->input != input) column = codes.column<kCoding>(strips, input = at->input);
      float *const to = out + (at->row - row) * kPair;
      _mm512_store_ps(to, _mm512_fmadd_ps(column, _mm512_set1_ps(at->value), _mm512_load_ps(to)));
    }
  }
}

// The kernels for one format.
struct Kernels {
  decltype(&read_part<4>) read;
  decltype(&multiply_parts<1, 1, false>) parts;
  decltype(&add_outliers<4>) add;
  decltype(&multiply_few<1, 4, 1, false>) few[4];  // of 1, 2, 4 and 8 rows
};

template <int kCoding, int kHalves, bool kOffsets>
Kernels kernels() {
  return {read_part<kCoding>,
          multiply_parts<kRowsAtOnce, kHalves, kOffsets>,
          add_outliers<kCoding>,
          {multiply_few<1, kCoding, kHalves, kOffsets>, multiply_few<2, kCoding, kHalves, kOffsets>,
           multiply_few<4, kCoding, kHalves, kOffsets>, multiply_few<8, kCoding, kHalves, kOffsets>}};
}

template <int kCoding>
Kernels choose(const Codes &codes) {
  if (codes.has_halves())
    return codes.has_offsets() ? kernels<kCoding, 2, true>() : kernels<kCoding, 2, false>();
  return codes.has_offsets() ? kernels<kCoding, 1, true>() : kernels<kCoding, 1, false>();
}

Kernels choose(const Codes &codes) {
  if (codes.coding() == kValues) return choose<kValues>(codes);
  if (codes.coding() == 4) return choose<4>(codes);
  return codes.coding() == 6 ? choose<6>(codes) : choose<8>(codes);
}

// Multiplies few rows. If they are not as many as a kernel has, some are multiplied in vain.
void few_rows(const tw_linear &a, const Codes &codes, const Kernels &kernels,
              const RoundedRows &rows, const Share &share, float *products) {
  const int64_t depth = a.inputs / kTileInner, count = share.end - share.start;
  const auto multiply = kernels.few[count > 4 ? 3 : count > 2 ? 2 : count - 1];
  const StripRows strip(rows, share.start, 0, depth);
  codes.begin(share.first);
  for (int64_t panel = share.first; panel < share.last; panel++) {
    codes.prepare(panel);
    for (int64_t tile = 0; tile < 2; tile++) {
      const Strips strips = codes.strips(panel, tile);
      float *const out = products + tile * kTileRows;
      multiply(codes, strips, strip, depth, out);
      kernels.add(codes, strips, rows, depth, share.start, count, out);
    }
    finish_rows(a, {products, share.start, count, panel}, 0, count);
  }
}

// Multiplies part after part of each panel. A row's sum is independent of the number of rows:
// integers are exact, and float32 additions in the order of the inputs.
void many_rows(const tw_linear &a, const Codes &codes, const Kernels &kernels,
               const RoundedRows &rows, const Share &share, float *products) {
  static thread_local TilePart parts[2];
  const int64_t depth = a.inputs / kTileInner, count = share.end - share.start;
  codes.begin(share.first);
  for (int64_t panel = share.first; panel < share.last; panel++) {
    codes.prepare(panel);
    memset(products, 0, static_cast<size_t>(divide_up(count, kTileRows) * kTileRows * kPair) * 4);
    for (int64_t step = 0; step < depth; step += kPartSteps) {
      const int64_t steps = smaller(kPartSteps, depth - step);
      for (int64_t tile = 0; tile < 2; tile++)
        kernels.read(codes, codes.strips(panel, tile), step, steps, parts[tile]);
      for (int64_t row = 0; row < count; row += kRowsAtOnce) {
        const StripRows strip(rows, share.start + row, step, depth);
        kernels.parts(strip, parts, steps, products + row * kPair);
      }
    }
    for (int64_t tile = 0; tile < 2; tile++)
      kernels.add(codes, codes.strips(panel, tile), rows, depth, share.start, count,
                  products + tile * kTileRows);
    for (int64_t row = 0; row < count; row += kPair)
      finish_rows(a, {products + row * kPair, share.start + row, smaller(count - row, kPair), panel},
                  0, kPair);
  }
}

}  // namespace

void avx512_groups_linear(const tw_linear *linear) {
  const tw_linear a = *linear;
  const Codes codes(a);
  const Kernels kernels = choose(codes);
  const RoundedRows rows = round_rows(a, codes.has_halves());
  const Limits limits{kPartSteps, kMostElements, a.outputs};
  distribute(a, limits, [&](const Share &share, const Order &, float *products) {
    const bool few = share.end - share.start <= kFewRows;
    (few ? few_rows : many_rows)(a, codes, kernels, rows, share, products);
  });
}
