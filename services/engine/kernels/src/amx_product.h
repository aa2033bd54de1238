// AMX products, shared by the linear layers of all weight formats.
#pragma once

#include "amx.h"
#include "product.h"

// amx_linear with int8 weights or weights in groups.
void amx_linear_decoded(const tw_linear &linear);

namespace {

// Limits for an L2 cache of 2 MB.
constexpr int64_t kMostElements = 512 << 10;
constexpr int64_t kMostPanels = 8;

// Adds the product of two tiles to a third: of bfloat16, or of int8 to int32. The numbers of tiles
// must be literals.
#define TW_ADD_PRODUCT(kBytes, sums, rows, weights) \
  if constexpr (kBytes)                             \
    _tile_dpbssd(sums, rows, weights);              \
  else                                              \
    _tile_dpbf16ps(sums, rows, weights)

// Adds the product of 32 rows and one panel, both in tiles, over `steps` steps to tiles 0 to 3.
// meanwhile(step) is work for the core's other units.
template <bool kTwoRowTiles, bool kBytes = false, typename Meanwhile>
inline void multiply_tiles(const uint16_t *rows, const uint16_t *panel, int64_t steps,
                           const Meanwhile &meanwhile) {
  for (int64_t step = 0; step < steps; step++, rows += kStep, panel += kStep) {
    meanwhile(step);
    _tile_loadd(6, panel, 64);
    _tile_loadd(7, panel + kTile, 64);
    // Streamed, so that rows don't evict the panel from the L1 cache.
    _tile_stream_loadd(4, rows, 64);
    TW_ADD_PRODUCT(kBytes, 0, 4, 6);
    TW_ADD_PRODUCT(kBytes, 1, 4, 7);
    if (kTwoRowTiles) {
      _tile_stream_loadd(5, rows + kTile, 64);
      TW_ADD_PRODUCT(kBytes, 2, 5, 6);
      TW_ADD_PRODUCT(kBytes, 3, 5, 7);
    }
  }
}

// Operands of a step: 32 rows and a panel.
struct Operands {
  const uint16_t *rows, *panel;
};

inline void load_operands(const Operands &at) {
  _tile_stream_loadd(4, at.rows, 64);
  _tile_loadd(6, at.panel, 64);
  _tile_loadd(7, at.panel + kTile, 64);
  _tile_stream_loadd(5, at.rows + kTile, 64);
}

// As multiply_tiles<true>, with the first step's operands already loaded. It ends by loading
// `following`, so that the tile unit need not wait for the store of the sums.
template <bool kBytes = false, typename Meanwhile>
inline void multiply_chained(Operands at, int64_t steps, const Operands &following,
                             const Meanwhile &meanwhile) {
  for (int64_t step = 0; step < steps; step++) {
    meanwhile(step);
    at = step + 1 < steps ? Operands{at.rows + kStep, at.panel + kStep} : following;
    TW_ADD_PRODUCT(kBytes, 0, 4, 6);
    TW_ADD_PRODUCT(kBytes, 1, 4, 7);
    _tile_stream_loadd(4, at.rows, 64);
    TW_ADD_PRODUCT(kBytes, 2, 5, 6);
    _tile_loadd(6, at.panel, 64);
    TW_ADD_PRODUCT(kBytes, 3, 5, 7);
    _tile_loadd(7, at.panel + kTile, 64);
    _tile_stream_loadd(5, at.rows + kTile, 64);
  }
}

inline void zero_products() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void load_products(const float *upper) {
  const float *lower = upper + kTileRows * kPair;
  _tile_loadd(0, upper, kPair * 4);
  _tile_loadd(1, upper + kTileRows, kPair * 4);
  _tile_loadd(2, lower, kPair * 4);
  _tile_loadd(3, lower + kTileRows, kPair * 4);
}

inline void store_products(float *upper) {
  float *lower = upper + kTileRows * kPair;
  _tile_stored(0, upper, kPair * 4);
  _tile_stored(1, upper + kTileRows, kPair * 4);
  _tile_stored(2, lower, kPair * 4);
  _tile_stored(3, lower + kTileRows, kPair * 4);
}

}  // namespace
