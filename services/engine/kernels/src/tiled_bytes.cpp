// Linear layers with int8 weights on AVX-512 VNNI, on rows rounded to int8.
#include "byte_products.h"
#include "product.h"
#include "rounded_rows.h"
#include "tiled.h"

namespace {

constexpr int64_t kInputs = 2 * kTileInner;         // of a step
constexpr int64_t kStepBytes = kPair * kInputs;     // of a panel, and of 32 rows
constexpr int64_t kTileBytes = kTileRows * kInputs;
constexpr int64_t kLine = 64;
constexpr int64_t kPartSteps = 16;                  // steps whose weights stay in the L1 cache
constexpr int64_t kMostElements = 1 << 20;          // of the rows that stay in the L2 cache
constexpr int64_t kRowsAtOnce = 8;
constexpr int64_t kAhead = 4096;                    // bytes, if weights are read once
constexpr int32_t kZero = 128;  // added to weights: the product is one of bytes without a sign

// Rows of int8 in blocks of 32.
struct ByteRows {
  const int8_t *codes;    // [rows / 32][inputs / 64][32][64]
  const float *scales;
  const int32_t *starts;  // of each row's sums: -kZero * the sum of its codes

  const int8_t *at(int64_t row, int64_t step, int64_t depth) const {
    return codes + (row / kPair * depth + step) * kStepBytes + row % kPair * kInputs;
  }
};

// Rounds all rows of a product. The result is valid until the thread's next call.
ByteRows round_bytes(const tw_linear &a) {
  static thread_local Buffer memory;
  const WholeRows whole = round_whole_rows(a);
  const int64_t depth = a.inputs / kInputs;
  auto *starts = static_cast<int32_t *>(memory.reserve(a.num_rows * 4));
  const ByteRows rows{reinterpret_cast<const int8_t *>(whole.tiles), whole.scales, starts};
  parallel_for(divide_up(a.num_rows, kTileRows), [&](int64_t strip) {
    const int64_t first = strip * kTileRows, last = smaller(first + kTileRows, a.num_rows);
    for (int64_t row = first; row < last; row++) {
      __m512i sum = _mm512_setzero_si512();
      for (int64_t step = 0; step < depth; step++)
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1),
                                  _mm512_loadu_si512(rows.at(row, step, depth)));
      starts[row] = -kZero * _mm512_reduce_add_epi32(sum);
    }
  });
  return rows;
}

inline __m512i load_weights(const uint8_t *line) {
  return _mm512_xor_si512(_mm512_loadu_si512(line), _mm512_set1_epi8(-128));
}

// Adds the products of rows with some steps of a panel to `sums`: [kRows] with kPair columns.
// kAsks: whether to prefetch the weights that lie `ahead` bytes further.
template <int kRows, bool kAsks>
void multiply_steps(const int8_t *rows, const uint8_t *weights, int64_t steps, int64_t ahead,
                    int32_t *sums) {
  __m512i whole[2 * kRows];
#pragma GCC unroll 2
  for (int tile = 0; tile < 2; tile++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++)
      whole[tile * kRows + r] = _mm512_loadu_si512(sums + r * kPair + tile * kTileRows);
  for (int64_t step = 0; step < steps; step++, rows += kStepBytes, weights += kStepBytes) {
#pragma GCC unroll 4
    for (int64_t line = 0; line < kTileRows; line++) {
      const uint8_t *left = weights + line * kLine, *right = left + kTileBytes;
      if (kAsks) {
        _mm_prefetch(left + ahead, _MM_HINT_T0);
        _mm_prefetch(right + ahead, _MM_HINT_T0);
      }
      multiply_four<kRows, kInputs>(rows + 4 * line, load_weights(left), load_weights(right), whole);
    }
  }
#pragma GCC unroll 2
  for (int tile = 0; tile < 2; tile++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++)
      _mm512_storeu_si512(sums + r * kPair + tile * kTileRows, whole[tile * kRows + r]);
}

// Sets the sums of some rows to what makes weights without a sign equal to those with one.
inline void begin_sums(const int32_t *starts, int64_t count, int32_t *sums) {
  for (int64_t r = 0; r < count; r++)
    for (int64_t column = 0; column < kPair; column += kTileRows)
      _mm512_storeu_si512(sums + r * kPair + column, _mm512_set1_epi32(starts[r]));
}

// Multiplies up to 8 rows. If no kernel has as many, the next larger one computes rows in vain.
void few_rows(const tw_linear &a, const ByteRows &rows, const Share &share, float *products) {
  constexpr decltype(&multiply_steps<1, true>) kKernels[] = {
      multiply_steps<1, true>, multiply_steps<2, true>, multiply_steps<4, true>,
      multiply_steps<8, true>};
  const int64_t depth = a.inputs / kInputs, count = share.end - share.start;
  const auto multiply = kKernels[count > 4 ? 3 : count > 2 ? 2 : count - 1];
  const auto *weights = static_cast<const uint8_t *>(a.packed);
  auto *sums = reinterpret_cast<int32_t *>(products);
  for (int64_t panel = share.first; panel < share.last; panel++) {
    begin_sums(rows.starts + share.start, count, sums);
    multiply(rows.at(share.start, 0, depth), weights + panel * depth * kStepBytes, depth, kAhead,
             sums);
    finish_rows(a, {products, share.start, count, panel, rows.scales}, 0, count);
  }
}

// Multiplies part after part of each panel. The first rows prefetch the next part.
void many_rows(const tw_linear &a, const ByteRows &rows, const Share &share, float *products) {
  const int64_t depth = a.inputs / kInputs, count = share.end - share.start;
  const auto *weights = static_cast<const uint8_t *>(a.packed);
  auto *sums = reinterpret_cast<int32_t *>(products);
  for (int64_t panel = share.first; panel < share.last; panel++) {
    begin_sums(rows.starts + share.start, count, sums);
    for (int64_t step = 0; step < depth; step += kPartSteps) {
      const int64_t steps = smaller(kPartSteps, depth - step);
      const uint8_t *part = weights + (panel * depth + step) * kStepBytes;
      for (int64_t row = 0; row < count; row += kRowsAtOnce) {
        const auto multiply = row ? multiply_steps<kRowsAtOnce, false>
                                  : multiply_steps<kRowsAtOnce, true>;
        multiply(rows.at(share.start + row, step, depth), part, steps, steps * kStepBytes,
                 sums + row * kPair);
      }
    }
    for (int64_t row = 0; row < count; row += kPair)
      finish_rows(a,
                  {products + row * kPair, share.start + row, smaller(count - row, kPair), panel,
                   rows.scales},
                  0, kPair);
  }
}

}  // namespace

void avx512_bytes_linear(const tw_linear *linear) {
  const tw_linear a = *linear;
  const ByteRows rows = round_bytes(a);
  const Limits limits{kPartSteps, kMostElements, a.outputs, kMostRows};
  distribute(a, limits, [&](const Share &share, const Order &, float *products) {
    const bool few = share.end - share.start <= kRowsAtOnce;
    (few ? few_rows : many_rows)(a, rows, share, products);
  });
}
