// AMX: eight tile registers of 16 rows by 64 bytes. One instruction multiplies 16x32 by 32x16
// bfloat16 into 16x16 float32.
#pragma once

#include "tiles.h"

namespace {

// Keys of a decode that are worked on at a time. Read from memory, the more in a row the better.
constexpr int64_t kDecodeKeys = 256;
// Blocks lie in pages of their own, within which the core fetches ahead by itself.
constexpr bool kFetchesAlong = true;

inline void fetch_ahead(const void *line) {
  _mm_prefetch(static_cast<const char *>(line), _MM_HINT_T1);
}

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// A 2 x 2 block of products, C[i][j] += A[i] B[j]: tiles 0 to 3 hold C, 4 and 5 A, 6 and 7 B.
// Configures them for `rows` (1 to 32) rows of A, of which A[0] has the first 16.
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
  // GCC 12's intrinsic names only the first bytes as read: the others might never be written.
  __asm__ volatile("" : : "m"(config));
  _tile_loadconfig(&config);
}

inline void release_tiles() { _tile_release(); }

// sums [rows, 32] = those at `from`, or zero, + the products of factors(0), factors(1) and so on. The
// tiles are configured for `rows`.
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
