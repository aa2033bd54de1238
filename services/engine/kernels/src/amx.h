// Products of 2 x 2 tiles on AMX: eight tile registers of 16 rows by 64 bytes. One instruction
// multiplies 16x32 by 32x16 bfloat16 into 16x16 float32.
#pragma once

#include "tiles.h"

namespace {

// Keys of a decode in one span. Long runs of sequential reads are fastest.
constexpr int64_t kDecodeKeys = 256;
// Prefetch along all blocks at once: each lies in its own pages, where the core prefetches by
// itself.
constexpr bool kPrefetchesAlong = true;

inline void prefetch_line(const void *line) {
  _mm_prefetch(static_cast<const char *>(line), _MM_HINT_T1);
}

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Configures the tiles for products C[i][j] += A[i] B[j]: tiles 0 to 3 hold C, 4 and 5 A, 6 and 7
// B. A has `rows` (1 to 32) rows, A[0] the first 16 of them.
inline void configure_tiles(int64_t rows) {
  TileConfig config;
  uint8_t upper = static_cast<uint8_t>(rows < kTileRows ? rows : kTileRows);
  uint8_t lower = static_cast<uint8_t>(rows > kTileRows ? rows - kTileRows : kTileRows);
  for (int tile = 0; tile < 8; tile++) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = kTileRows;
  }
  config.rows[0] = config.rows[1] = config.rows[4] = upper;
  config.rows[2] = config.rows[3] = config.rows[5] = lower;
  // GCC 12's intrinsic declares only the first bytes as read, so the other stores could be dropped.
  __asm__ volatile("" : : "m"(config));
  _tile_loadconfig(&config);
}

inline void release_tiles() { _tile_release(); }

// Computes sums [rows, 32] = `from` (null: zero) + the products of factors(0) to factors(steps -
// 1). Requires tiles configured for `rows`.
template <typename Steps>
inline void multiply_block(int64_t rows, const float *from, float *sums, int64_t stride,
                           int64_t steps, const Steps &factors) {
  bool two = rows > kTileRows;
  if (from) {
    const float *lower = from + kTileRows * stride;
    _tile_loadd(0, from, stride * 4);
    _tile_loadd(1, from + kTileRows, stride * 4);
    if (two) {
      _tile_loadd(2, lower, stride * 4);
      _tile_loadd(3, lower + kTileRows, stride * 4);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; step++) {
    const Factors at = factors(step);
    _tile_loadd(6, at.left, 64);
    _tile_loadd(7, at.right, 64);
    _tile_loadd(4, at.rows, at.row_stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_loadd(5, at.rows + kTileRows * at.row_stride, at.row_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  float *lower = sums + kTileRows * stride;
  _tile_stored(0, sums, stride * 4);
  _tile_stored(1, sums + kTileRows, stride * 4);
  if (two) {
    _tile_stored(2, lower, stride * 4);
    _tile_stored(3, lower + kTileRows, stride * 4);
  }
}

}  // namespace
