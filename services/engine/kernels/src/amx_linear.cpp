// Linear layers on AMX, from bfloat16 weights packed once into tiles.
#include "amx_product.h"

namespace {

// The part of a panel that stays in the L1 cache while the rows pass by, in steps.
constexpr int64_t kMostSteps = 16;
constexpr int64_t kFewBlocks = 4;
constexpr int64_t kPrefetch = 4 * kStep;  // elements ahead

inline uint16_t round_to_bfloat16(float value) {
  return static_cast<uint16_t>(
      _mm_extract_epi16(reinterpret_cast<__m128i>(_mm_cvtneps_pbh(_mm_set_ss(value))), 0));
}

template <int kHint>
inline void fetch_lines(const uint16_t *from, int64_t lines) {
  for (int64_t line = 0; line < lines; line++)
    _mm_prefetch(reinterpret_cast<const char *>(from + line * kTileInner),
                 static_cast<_mm_hint>(kHint));
}

// A part of a panel stays in the L1 cache and a sweep's rows in the L2 cache while they meet; sums
// wait in `products` meanwhile. A row's sum is the same however many rows there are: always in the
// order of the inputs, always in float32.
void multiply(const tw_linear &a, const Share &share, const Order &order, float *products) {
  int64_t depth = a.inputs / kTileInner, blocks = divide_up(share.end - share.start, kPair);
  const auto *tiles = static_cast<const uint16_t *>(a.rows);
  const auto *packed = static_cast<const uint16_t *>(a.packed);
  int64_t lines = divide_up(kPair, blocks);  // to fetch in a step
  int64_t configured = 0, turn = 0;
  Finished finished{};
  for (int64_t sweep = 0; sweep < depth; sweep += order.sweep) {
    int64_t sweep_end = smaller(sweep + order.sweep, depth);
    for (int64_t panel = share.first; panel < share.last; panel++) {
      for (int64_t step = sweep; step < sweep_end; step += order.part) {
        int64_t steps = smaller(order.part, sweep_end - step);
        int64_t rows_a_step = divide_up(kPair, steps);
        bool last = step + steps == depth;
        const uint16_t *weights = packed + (panel * depth + step) * kStep;
        const uint16_t *next = weights + steps * kStep;
        if (step + steps == sweep_end) next += (depth - (sweep_end - sweep)) * kStep;
        for (int64_t block = 0; block < blocks; block++) {
          int64_t row = share.start + block * kPair, count = smaller(share.end - row, kPair);
          if (count != configured) configure_tiles(configured = count);
          int64_t slot = order.sweeps ? (panel - share.first) * blocks + block
                         : blocks > 1        ? block
                                             : turn++ % 2;
          float *sums = products + slot * kPair * kPair;
          if (step) {
            load_products(sums);
          } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
          }
          auto finish = [&](int64_t at) {
            int64_t from = at * rows_a_step, to = from + rows_a_step;
            for (int64_t i = from; i < smaller(to, finished.count); i++)
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
  }
  for (int64_t i = 0; i < finished.count; i++)
    finish_row(a, finished.products + i * kPair, finished.row + i, finished.panel);
}

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
      uint16_t *to = panel + tile_index(k, column);
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
  if (a.scales) return multiply_int8(a);
  // Few blocks of rows meet a panel too seldom for keeping parts of it to pay: the sums would wait.
  int64_t most_steps = a.num_rows > kFewBlocks * kPair ? kMostSteps : a.inputs / kTileInner;
  share_out(a, most_steps, [&](const Share &share, const Order &order, float *sums) {
    multiply(a, share, order, sums);
  });
}
