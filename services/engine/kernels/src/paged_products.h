// Products of attention: tiles of rows times 16 or 32 columns, whose sums stay in registers.
#pragma once

#include "cache_numbers.h"
#include "integers.h"

namespace {

constexpr int64_t kRun = 16;              // tokens whose keys lie side by side
constexpr int64_t kSpan = 64;             // keys of an update of the softmax
constexpr int64_t kRuns = kSpan / kRun;   // runs of a span
constexpr int64_t kVectors = kRun / kLanes;

// Sums that fit the registers beside their factors, and rows of a tile.
#if defined(__AVX512F__) || defined(__aarch64__)  // 32 registers
constexpr int64_t kMostSums = 24;
#else
constexpr int64_t kMostSums = 12;
#endif
constexpr int kTileRows = static_cast<int>(kLanes == 16 ? kMostSums / 2 : kMostSums / kVectors);

// Returns how many parts of 16 columns a tile of so many rows has.
constexpr int parts_of(int rows) { return rows * 2 * kVectors <= kMostSums ? 2 : 1; }

// Keys that one update of the softmax covers.
template <typename Number>
struct Span {
  int64_t first = 0, count = 0;  // keys
  const Number *keys[kRuns];     // [width, kRun] each; past the last run, that run again
  const Number *values[kRuns];   // [kRun, width] each
};

template <int kRows>
using Sums = Lanes[kRows][kVectors * parts_of(kRows)];

// sums [kRows, 16 * kParts] += factors [kRows, count] @ columns [count, 16 * kParts]
//
// Factors are kStep apart, and those of two rows kRowStep. columns: the parts, whose rows are
// `step` numbers apart; ahead: memory to prefetch meanwhile, as many numbers as are read. It is
// prefetched in order and into the second cache, which has the processor fetch more of it.
template <int kRows, int kParts, int64_t kStep, int64_t kRowStep, typename Number>
inline __attribute__((always_inline)) void multiply(int64_t count, const float *factors,
                                                    const Number *const *columns, int64_t step,
                                                    const Number *ahead, Sums<kRows> &sums) {
  constexpr int kColumns = kVectors * kParts;
  constexpr int64_t kFetched = kParts * kRun, kLine = 64 / sizeof(Number);
  for (int64_t i = 0; i < count; i++) {
#pragma GCC unroll 2
    for (int64_t at = 0; at < kFetched; at += kLine)
      __builtin_prefetch(ahead + i * kFetched + at, 0, 1);
    const auto column = [&](int v) {
      return widen(columns[v / kVectors] + i * step + v % kVectors * kLanes);
    };
    const auto factor = [&](int r) { return broadcast(factors[i * kStep + r * kRowStep]); };
    // The fewer of the two are in registers, beside the sums.
    if constexpr (kRows > kColumns) {
      Lanes right[kColumns];
#pragma GCC unroll 8
      for (int v = 0; v < kColumns; v++) right[v] = column(v);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; r++) {
        const Lanes left = factor(r);
#pragma GCC unroll 8
        for (int v = 0; v < kColumns; v++) sums[r][v] += left * right[v];
      }
    } else {
      Lanes left[kRows];
#pragma GCC unroll 12
      for (int r = 0; r < kRows; r++) left[r] = factor(r);
#pragma GCC unroll 8
      for (int v = 0; v < kColumns; v++) {
        const Lanes one = column(v);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) sums[r][v] += left[r] * one;
      }
    }
  }
}

// Writes the scores of kRows rows for a span's keys. queries: [head_dim, kRows]; scores: [kRows,
// kSpan].
template <int kRows, typename Number>
void score_tile(const Span<Number> &span, const Span<Number> &ahead, const float *queries,
                int64_t head_dim, float *scores) {
  constexpr int kParts = parts_of(kRows);
  for (int64_t run = 0; run * kRun < span.count; run += kParts) {
    Sums<kRows> sums = {};
    multiply<kRows, kParts, kRows, 1>(head_dim, queries, span.keys + run, kRun, ahead.keys[run],
                                      sums);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors * kParts; v++)
        store(scores + r * kSpan + run * kRun + v * kLanes, sums[r][v]);
  }
}

// state [kRows, 16 * kParts] += weights [kRows, kSpan] @ values, from column `first` on.
template <int kRows, int kParts, typename Number>
inline __attribute__((always_inline)) void gather_columns(const Span<Number> &span,
                                                          const Span<Number> &ahead,
                                                          const float *weights, int64_t width,
                                                          int64_t first, float *state) {
  Sums<kRows> sums;
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors * kParts; v++)
      sums[r][v] = widen(state + r * width + first + v * kLanes);
  for (int64_t run = 0; run * kRun < span.count; run++) {
    const Number *columns[kParts];
    for (int p = 0; p < kParts; p++) columns[p] = span.values[run] + first + p * kRun;
    multiply<kRows, kParts, 1, kSpan>(smaller(span.count - run * kRun, kRun), weights + run * kRun,
                                      columns, width, ahead.values[run] + first * kRun, sums);
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors * kParts; v++)
      store(state + r * width + first + v * kLanes, sums[r][v]);
}

// state [kRows, width] += weights [kRows, kSpan] @ values. Values past the span are not read: they
// may be NaN.
template <int kRows, typename Number>
void gather_tile(const Span<Number> &span, const Span<Number> &ahead, const float *weights,
                 int64_t width, float *state) {
  constexpr int kParts = parts_of(kRows);
  int64_t first = 0;
  for (; first + kParts * kRun <= width; first += kParts * kRun)
    gather_columns<kRows, kParts>(span, ahead, weights, width, first, state);
  if (kParts > 1 && first < width)
    gather_columns<kRows, 1>(span, ahead, weights, width, first, state);
}

// A number of rows as a type.
template <int kRows>
struct Rows {
  static constexpr int count = kRows;
};

// Calls body(Rows<rows>()). rows: from 1 to kRows.
template <int kRows = kTileRows, typename Body>
inline void with_rows(int64_t rows, const Body &body) {
  if (rows == kRows) return body(Rows<kRows>());
  if constexpr (kRows > 1) with_rows<kRows - 1>(rows, body);
}

}  // namespace
