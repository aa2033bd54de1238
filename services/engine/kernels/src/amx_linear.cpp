// Linear layers on AMX with weights in tiles: bfloat16, or int8 that multiplies rows of int8.
#include "amx_product.h"
#include "rounded_rows.h"
#include "tiled.h"

namespace {

// Steps of the part of a panel that stays in the L1 cache while rows pass.
constexpr int64_t kMostSteps = 16;
// With so few blocks of rows, parts of a panel are not reused enough to pay for waiting sums.
constexpr int64_t kFewBlocks = 2;
constexpr int64_t kNear = 4 * kStep;  // elements ahead
// Memory streams along which the next part is prefetched. In a single stream nearly every prefetch
// misses and occupies the core's few outstanding requests, which rows need. Along several, the
// core's own prefetcher has brought most lines to the L2 cache.
constexpr int64_t kStreams = 8;
constexpr int64_t kStreamedBlocks = 8;  // of rows; with more, one stream is fast enough

// Prefetches the lines of a step. Back-to-back requests would fill the core's queues and stall
// everything else; a pause of a few instructions between them gives a higher rate.
inline void prefetch_step(const uint16_t *from) {
#pragma GCC unroll 1
  for (int64_t line = 0; line < kPair; line++) {
    _mm_prefetch(reinterpret_cast<const char *>(from + line * kTileInner), _MM_HINT_T0);
    __asm__ volatile("nop\n nop\n nop\n nop");
  }
}

// Prefetches `lines` of `all` cache lines, from `first` on, in order or along several streams.
inline void prefetch_next(const uint16_t *from, int64_t all, bool streams, int64_t first,
                       int64_t lines) {
  for (int64_t i = first; i < first + lines; i++) {
    int64_t line = streams ? i % kStreams * (all / kStreams) + i / kStreams : i;
    _mm_prefetch(reinterpret_cast<const char *>(from + line * kTileInner), _MM_HINT_T1);
  }
}

// Multiplies up to 32 rows, limited by memory bandwidth. Panels are multiplied as they are read.
template <bool kTwoRowTiles, bool kBytes>
void multiply_block(const tw_linear &a, const Share &share, float *products,
                    const float *row_scales) {
  int64_t depth = a.inputs / kTileInner, count = share.end - share.start;
  int64_t rows_a_step = divide_up(kPair, depth);
  const auto *rows = static_cast<const uint16_t *>(a.rows) + share.start * a.inputs;
  const auto *weights = static_cast<const uint16_t *>(a.packed) + share.first * depth * kStep;
  Finished finished{};
  configure_tiles(count);
  for (int64_t panel = share.first; panel < share.last; panel++, weights += depth * kStep) {
    float *sums = products + panel % 2 * kPair * kPair;
    zero_products();
    multiply_tiles<kTwoRowTiles, kBytes>(rows, weights, depth, [&](int64_t at) {
      prefetch_step(weights + kNear + at * kStep);
      finish_rows(a, finished, at * rows_a_step, (at + 1) * rows_a_step);
    });
    store_products(sums);
    finished = {sums, share.start, count, panel, row_scales};
  }
  finish_rows(a, finished, 0, kPair);
}

// Multiplies many rows. A part of a panel stays in the L1 cache and a sweep's rows in the L2 cache;
// partial sums wait in `products`. A row's sum is independent of the number of rows: float32
// additions in the order of the inputs.
template <bool kBytes>
void multiply(const tw_linear &a, const Share &share, const Order &order, float *products,
              const float *row_scales) {
  int64_t depth = a.inputs / kTileInner, blocks = divide_up(share.end - share.start, kPair);
  const auto *rows = static_cast<const uint16_t *>(a.rows) + share.start * a.inputs;
  const auto *packed = static_cast<const uint16_t *>(a.packed);
  auto operands = [&](int64_t block, const Part &part) {
    return Operands{rows + (block * depth + part.step) * kStep,
                    packed + (part.panel * depth + part.step) * kStep};
  };
  int64_t lines = divide_up(kPair, blocks);  // to fetch in a step
  bool streams = blocks <= kStreamedBlocks;
  alignas(64) float whole[2][kPair * kPair];  // complete sums, to be finished
  Finished finished{};
  Part part{0, share.first, 0, smaller(order.part, order.sweep)};
  configure_tiles(kPair);
  load_operands(operands(0, part));
  while (part.sweep < depth) {
    Part next = after(part, share, order, depth);
    Operands ahead = operands(0, next.steps ? next : part);
    // Finish the previous block late: reading a tile right after its store is slow.
    int64_t wait = part.steps * 3 / 4, rows_a_step = divide_up(kPair, part.steps - wait);
    bool last = part.step + part.steps == depth;
    for (int64_t block = 0; block < blocks; block++) {
      int64_t row = share.start + block * kPair, count = smaller(share.end - row, kPair);
      int64_t slot = order.sweeps ? (part.panel - share.first) * blocks + block : block;
      float *sums = products + slot * kPair * kPair;
      Operands at = operands(block, part);
      bool cold = part.panel == share.first && block == 0;
      if (part.step)
        load_products(sums);
      else
        zero_products();
      if (last) sums = whole[block % 2];
      Operands following = block + 1 < blocks ? operands(block + 1, part) : ahead;
      multiply_chained<kBytes>(at, part.steps, following, [&](int64_t step) {
        if (cold) prefetch_step(at.panel + kNear + step * kStep);
        prefetch_next(ahead.panel, part.steps * kPair, streams, (block * part.steps + step) * lines,
                   lines);
        if (step >= wait)
          finish_rows(a, finished, (step - wait) * rows_a_step, (step - wait + 1) * rows_a_step);
      });
      store_products(sums);
      finished = {sums, row, last ? count : 0, part.panel, row_scales};
    }
    part = next;
  }
  finish_rows(a, finished, 0, kPair);
}

template <bool kBytes>
void multiply(const tw_linear &a, const float *row_scales) {
  int64_t most_steps = a.num_rows > kFewBlocks * kPair ? kMostSteps : a.inputs / kTileInner;
  const Limits limits{most_steps, kMostElements, kMostPanels};
  distribute(a, limits, [&](const Share &share, const Order &order, float *sums) {
    int64_t count = share.end - share.start;
    if (count <= kTileRows)
      multiply_block<false, kBytes>(a, share, sums, row_scales);
    else if (count <= kPair)
      multiply_block<true, kBytes>(a, share, sums, row_scales);
    else
      multiply<kBytes>(a, share, order, sums, row_scales);
    _tile_release();
  });
}

}  // namespace

void amx_linear(const tw_linear *linear) {
  tw_linear a = *linear;
  if (a.format == TW_INT8 || a.format == TW_GROUPS) return amx_linear_decoded(a);
  if (a.format == TW_PACKED) return multiply<false>(a, nullptr);
  // A tile of int8 looks like one of half as many inputs in bfloat16.
  const WholeRows rows = round_whole_rows(a);
  a.rows = rows.tiles;
  a.inputs /= 2;
  multiply<true>(a, rows.scales);
}
