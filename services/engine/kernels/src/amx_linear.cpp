// Linear layers on AMX, from weights packed once into tiles.
#include <string.h>

#include "amx.h"
#include "buffer.h"
#include "kernels.h"
#include "threads.h"

namespace {

// Rows and panels that one item of a loop multiplies at most where rows are many: their share of
// the inputs, and the sums, should stay in the L2 cache.
constexpr int64_t kMostRows = 256;
constexpr int64_t kMostPanels = 8;
constexpr int64_t kStep = 2 * kTile;  // elements of 32 rows, or of a panel, along 32 inputs
// The part of a panel that stays in the L1 cache while the rows pass by, in such steps.
constexpr int64_t kMostSteps = 16;
constexpr int64_t kPrefetch = 4 * kStep;  // elements ahead

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
// meanwhile(step) is what the other units of the core do besides.
template <bool kTwoRowTiles, typename Meanwhile>
inline void multiply_tiles(const uint16_t *rows, const uint16_t *panel, int64_t steps,
                           const Meanwhile &meanwhile) {
  for (int64_t step = 0; step < steps; step++, rows += kStep, panel += kStep) {
    meanwhile(step);
    _tile_loadd(6, panel, 64);
    _tile_loadd(7, panel + kTile, 64);
    // Rows only pass by: they should not push the panel out of the L1 cache.
    _tile_stream_loadd(4, rows, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwoRowTiles) {
      _tile_stream_loadd(5, rows + kTile, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

template <int kHint>
inline void fetch_lines(const uint16_t *from, int64_t lines) {
  for (int64_t line = 0; line < lines; line++)
    _mm_prefetch(reinterpret_cast<const char *>(from + line * kTileInner),
                 static_cast<_mm_hint>(kHint));
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

// Rows start to end - 1 and panels first to last - 1, which one item of a loop multiplies.
struct Share {
  int64_t start, end;
  int64_t first, last;
};

// Products of up to 32 rows and one panel that are to be finished.
struct Finished {
  const float *products;
  int64_t row, count;
  int64_t panel;
};

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

// Goes through the inputs in parts, so that a part of a panel stays in the L1 cache, and that of
// the rows in the L2 cache, while they meet; sums wait in `products` meanwhile. A row's sum is the
// same however many rows there are: always in the order of the inputs, always in float32.
void multiply(const tw_linear &a, const uint16_t *tiles, const Share &share, float *products) {
  int64_t depth = a.inputs / kTileInner, blocks = divide_up(share.end - share.start, kPair);
  const uint16_t *packed = static_cast<const uint16_t *>(a.packed);
  int64_t part = blocks > 1 ? divide_up(depth, divide_up(depth, kMostSteps)) : depth;
  int64_t lines = divide_up(kStep / kTileInner, blocks);  // to fetch in a step
  // Sums are kept from part to part, or only until they are finished.
  int64_t kept = part < depth ? (share.last - share.first) * blocks : 2;
  int64_t configured = 0;
  Finished finished{};
  for (int64_t step = 0; step < depth; step += part) {
    int64_t steps = smaller(part, depth - step), rows_a_step = divide_up(kPair, steps);
    bool last = step + steps == depth;
    for (int64_t panel = share.first; panel < share.last; panel++) {
      const uint16_t *weights = packed + (panel * depth + step) * kStep;
      const uint16_t *next = panel + 1 < share.last
                                 ? weights + depth * kStep
                                 : packed + (share.first * depth + step + steps) * kStep;
      for (int64_t block = 0; block < blocks; block++) {
        int64_t row = share.start + block * kPair, count = smaller(share.end - row, kPair);
        if (count != configured) configure_tiles(configured = count);
        int64_t slot = ((panel - share.first) * blocks + block) % kept;
        float *sums = products + slot * kPair * kPair;
        if (step) {
          load_products(sums);
        } else {
          _tile_zero(0);
          _tile_zero(1);
          _tile_zero(2);
          _tile_zero(3);
        }
        if (last) fetch_out(a, row, count, panel);
        auto finish = [&](int64_t at) {
          int64_t end = smaller((at + 1) * rows_a_step, finished.count);
          for (int64_t i = at * rows_a_step; i < end; i++)
            finish_row(a, finished.products + i * kPair, finished.row + i, finished.panel);
        };
        const uint16_t *rows = tiles + (row / kPair * depth + step) * kStep;
        if (blocks > 1) {
          // There is time to fetch the part of a panel that comes next.
          multiply_tiles<true>(rows, weights, steps, [&](int64_t at) {
            fetch_lines<_MM_HINT_T1>(next + (block * steps + at) * lines * kTileInner, lines);
            finish(at);
          });
        } else {
          // It reads the panel while it multiplies, a little ahead of itself.
          auto meanwhile = [&](int64_t at) {
            fetch_lines<_MM_HINT_T0>(weights + kPrefetch + at * kStep, lines);
            finish(at);
          };
          if (count > kTileRows)
            multiply_tiles<true>(rows, weights, steps, meanwhile);
          else
            multiply_tiles<false>(rows, weights, steps, meanwhile);
        }
        store_products(sums);
        finished = {sums, row, last ? count : 0, panel};
      }
    }
  }
  for (int64_t i = 0; i < finished.count; i++)
    finish_row(a, finished.products + i * kPair, finished.row + i, finished.panel);
}

// Copies up to 16 rows into every other tile: loaded from there, none share a cache set.
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
  parallel_for(pairs, [&](int64_t pair) {
    int64_t end = smaller((pair + 1) * kPair, a.num_rows);
    for (int64_t row = pair * kPair; row < end; row += kTileRows) pack_rows(a, row, tiles);
  });
  // Neighbouring panels go to one thread, so that its reads run on; four shares for each thread
  // are enough for one that is slow or away.
  int64_t width = larger(panels / (4 * num_threads()), 1);
  if (pairs > 1) width = smaller(width, kMostPanels);
  int64_t columns = divide_up(panels, width);
  parallel_for(divide_up(a.num_rows, kMostRows) * columns, [&](int64_t item) {
    int64_t start = item / columns * kMostRows, first = item % columns * width;
    Share share{start, smaller(start + kMostRows, a.num_rows), first,
                smaller(first + width, panels)};
    int64_t sums = larger(width * smaller(pairs, kMostRows / kPair), 2) * kPair * kPair;
    multiply(a, tiles, share, static_cast<float *>(products.reserve(sums * 4)));
    _tile_release();
  });
}
