// Linear layers on AMX, from weights packed once into tiles.
#include <string.h>

#include "amx.h"
#include "buffer.h"
#include "kernels.h"
#include "threads.h"

namespace {

// What is multiplied with a part of a panel before the next one's turn: the rows' parts should stay
// in the L2 cache.
#ifndef MR
#define MR 256
#define MP 8
#define STEPS 16
#endif
constexpr int64_t kMostRows = MR;
constexpr int64_t kMostPanels = MP;
// The part of a panel that stays in the L1 cache while rows pass by, in steps of 32 inputs.
constexpr int64_t kMostSteps = STEPS;
constexpr int64_t kStep = 2 * kTile;  // elements of 32 rows, or 32 columns, in one step
constexpr int64_t kPrefetch = 4 * kStep;

inline float weight_at(int32_t dtype, const void *weight, int64_t index) {
  if (dtype == TW_FLOAT32) return static_cast<const float *>(weight)[index];
  uint16_t bits = static_cast<const uint16_t *>(weight)[index];
  if (dtype == TW_FLOAT16) return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

inline uint16_t round_to_bfloat16(float value) {
  return static_cast<uint16_t>(
      _mm_extract_epi16(reinterpret_cast<__m128i>(_mm_cvtneps_pbh(_mm_set_ss(value))), 0));
}

// Adds the product of 32 rows and one panel, both in tiles, over `steps` steps to tiles 0 to 3.
//
// What is needed next is fetched meanwhile: `lines` cache lines for each step, from `next` on.
template <bool kTwoRowTiles, bool kStream>
inline void multiply_tiles(const uint16_t *rows, const uint16_t *panel, int64_t steps,
                           const uint16_t *next, int64_t lines) {
  for (int64_t step = 0; step < steps; step++, rows += kStep, panel += kStep) {
    for (int64_t line = 0; line < lines; line++, next += kTileInner)
      _mm_prefetch(reinterpret_cast<const char *>(next), kStream ? _MM_HINT_T0 : _MM_HINT_T1);
    _tile_loadd(6, panel, 64);
    _tile_loadd(7, panel + kTile, 64);
    _tile_loadd(4, rows, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwoRowTiles) {
      _tile_loadd(5, rows + kTile, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Writes one row of 32 products where the epilogue wants them.
inline void finish_row(const tw_linear &a, const float *product, int64_t row, int64_t panel) {
  __m512 low = _mm512_load_ps(product), high = _mm512_load_ps(product + kTileRows);
  int64_t column = panel * kPair;
  if (a.bias) {
    low = _mm512_add_ps(low, _mm512_loadu_ps(a.bias + column));
    high = _mm512_add_ps(high, _mm512_loadu_ps(a.bias + column + kTileRows));
  }
  if (a.epilogue == TW_GATE) {
    __m512 one = _mm512_set1_ps(1.0f);
    __m512 decay = exp2(_mm512_mul_ps(low, _mm512_set1_ps(-kLog2E)));
    __m512 gated = _mm512_mul_ps(_mm512_div_ps(low, _mm512_add_ps(one, decay)), high);
    int64_t width = a.outputs / 2, left = width - panel * kTileRows;
    __mmask16 mask = left >= kTileRows ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    auto out = static_cast<uint16_t *>(a.out) + row * width + panel * kTileRows;
    _mm256_mask_storeu_epi16(out, mask, to_bfloat16(gated));
    return;
  }
  int64_t left = a.outputs - column;
  uint32_t mask = left >= kPair ? 0xffffffffu : (1u << left) - 1;
  auto first = static_cast<__mmask16>(mask), second = static_cast<__mmask16>(mask >> 16);
  if (a.epilogue == TW_STORE_FLOAT32) {
    float *out = static_cast<float *>(a.out) + row * a.outputs + column;
    _mm512_mask_storeu_ps(out, first, low);
    _mm512_mask_storeu_ps(out + kTileRows, second, high);
    return;
  }
  auto out = static_cast<uint16_t *>(a.out) + row * a.outputs + column;
  if (a.epilogue == TW_ADD) {
    low = _mm512_add_ps(low, to_float(_mm256_maskz_loadu_epi16(first, out)));
    high = _mm512_add_ps(high, to_float(_mm256_maskz_loadu_epi16(second, out + kTileRows)));
  }
  _mm256_mask_storeu_epi16(out, first, to_bfloat16(low));
  _mm256_mask_storeu_epi16(out + kTileRows, second, to_bfloat16(high));
}

// Fetches what finish_row is going to write.
inline void fetch_out(const tw_linear &a, int64_t row, int64_t count, int64_t panel) {
  int64_t size = a.epilogue == TW_STORE_FLOAT32 ? 4 : 2, halves = a.epilogue == TW_GATE ? 2 : 1;
  int64_t stride = a.outputs / halves * size;
  const char *out = static_cast<const char *>(a.out) + row * stride + panel * kPair / halves * size;
  for (int64_t i = 0; i < count; i++) __builtin_prefetch(out + i * stride, 1);
}

// Rows start to end - 1 and panels first to last - 1, which one item of the loop multiplies.
struct Block {
  int64_t start, end;
  int64_t first, last;
};

// Goes through the inputs in parts, so that a part of a panel stays in the L1 cache, and that of the
// rows in the L2 cache, while they meet. Sums in between wait in `products`.
void multiply(const tw_linear &a, const uint16_t *tiles, const Block &b, float *products) {
  int64_t depth = a.inputs / kTileInner, blocks = divide_up(b.end - b.start, kPair);
  const uint16_t *packed = static_cast<const uint16_t *>(a.packed);
  // One block of rows reads the panel while it multiplies, a little ahead of itself. More of them
  // leave time to fetch the next panel.
  int64_t most = blocks > 1 ? divide_up(depth, divide_up(depth, kMostSteps)) : depth;
  int64_t lines = divide_up(32, blocks);
  int64_t configured = 0;
  for (int64_t step = 0; step < depth; step += most) {
    int64_t steps = smaller(most, depth - step);
    bool last = step + steps == depth;
    for (int64_t panel = b.first; panel < b.last; panel++) {
      const uint16_t *weights = packed + (panel * depth + step) * kStep;
      const uint16_t *next = weights + kPrefetch;
      if (blocks > 1)
        next = panel + 1 < b.last ? weights + depth * kStep : packed + (b.first * depth + step + steps) * kStep;
      for (int64_t block = 0; block < blocks; block++) {
        int64_t row = b.start + block * kPair, count = smaller(b.end - row, kPair);
        if (count != configured) configure_tiles(configured = count);
        float *product = products + ((panel - b.first) * blocks + block) * kPair * kPair;
        float *lower = product + kTileRows * kPair;
        if (step) {
          _tile_loadd(0, product, kPair * 4);
          _tile_loadd(1, product + kTileRows, kPair * 4);
          _tile_loadd(2, lower, kPair * 4);
          _tile_loadd(3, lower + kTileRows, kPair * 4);
        } else {
          _tile_zero(0);
          _tile_zero(1);
          _tile_zero(2);
          _tile_zero(3);
        }
        if (last) fetch_out(a, row, count, panel);
        const uint16_t *rows = tiles + (row / kPair * depth + step) * kStep;
        if (blocks > 1)
          multiply_tiles<true, false>(rows, weights, steps, next, lines);
        else if (count > kTileRows)
          multiply_tiles<true, true>(rows, weights, steps, next, lines);
        else
          multiply_tiles<false, true>(rows, weights, steps, next, lines);
        next += steps * lines * kTileInner;
        _tile_stored(0, product, kPair * 4);
        _tile_stored(1, product + kTileRows, kPair * 4);
        _tile_stored(2, lower, kPair * 4);
        _tile_stored(3, lower + kTileRows, kPair * 4);
        if (last)
          for (int64_t i = 0; i < count; i++) finish_row(a, product + i * kPair, row + i, panel);
      }
    }
  }
}

// Copies 16 rows into every other tile, so that loading one touches every cache set alike.
void pack_rows(const tw_linear &a, int64_t start, uint16_t *tiles) {
  int64_t depth = a.inputs / kTileInner, count = smaller(kTileRows, a.num_rows - start);
  const uint16_t *from = static_cast<const uint16_t *>(a.rows) + start * a.inputs;
  uint16_t *to = tiles + start / kPair * depth * kStep + start % kPair / kTileRows * kTile;
  for (int64_t step = 0; step < depth; step++, from += kTileInner, to += kStep)
    for (int64_t row = 0; row < count; row++)
      _mm512_store_si512(to + row * kTileInner, _mm512_loadu_si512(from + row * a.inputs));
}

thread_local Buffer row_tiles;
thread_local Buffer products;

}  // namespace

int64_t tw_amx_packed_elements(int64_t outputs, int64_t inputs) {
  return divide_up(outputs, kPair) * kPair * divide_up(inputs, kTileInner) * kTileInner;
}

void tw_amx_pack(int32_t dtype, const void *weight, void *packed, int64_t outputs, int64_t inputs,
                 int64_t first_tile, int64_t tile_step) {
  int64_t depth = divide_up(inputs, kTileInner);
  parallel_for(divide_up(outputs, kTileRows), [=](int64_t tile) {
    int64_t column = first_tile + tile * tile_step;
    uint16_t *panel = static_cast<uint16_t *>(packed) + column / 2 * depth * 2 * kTile;
    for (int64_t k = 0; k < depth * kTileInner; k++) {
      uint16_t *to = panel + (k / kTileInner * 2 + column % 2) * kTile +
                     k % kTileInner / 2 * kPair + k % 2;
      for (int64_t n = 0; n < kTileRows; n++) {
        int64_t output = tile * kTileRows + n;
        bool inside = output < outputs && k < inputs;
        to[2 * n] = inside ? round_to_bfloat16(weight_at(dtype, weight, output * inputs + k)) : 0;
      }
    }
  });
}

void tw_amx_linear(const tw_linear *linear) {
  const tw_linear &a = *linear;
  int64_t pairs = divide_up(a.num_rows, kPair), panels = divide_up(a.outputs, kPair);
  auto tiles = static_cast<uint16_t *>(row_tiles.reserve(pairs * kPair * a.inputs * 2));
  parallel_for(pairs, [&](int64_t item) {
    for (int64_t row = item * kPair; row < smaller((item + 1) * kPair, a.num_rows); row += kTileRows)
      pack_rows(a, row, tiles);
  });
  // Neighbouring panels go to one thread, so that its reads run on; four shares for each thread
  // are enough for one that is slow or away.
  int64_t share = larger(panels / (4 * num_threads()), 1);
  if (a.num_rows > kPair) share = smaller(share, kMostPanels);
  int64_t shares = divide_up(panels, share);
  parallel_for(divide_up(a.num_rows, kMostRows) * shares, [&](int64_t item) {
    int64_t start = item / shares * kMostRows, first = item % shares * share;
    Block block{start, smaller(start + kMostRows, a.num_rows), first, smaller(first + share, panels)};
    int64_t products_size = share * divide_up(smaller(kMostRows, a.num_rows), kPair) * kPair * kPair * 4;
    multiply(a, tiles, block, static_cast<float *>(products.reserve(products_size)));
    _tile_release();
  });
}
