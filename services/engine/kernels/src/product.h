// Parts of linear layers that all instruction sets and weight formats share.
#pragma once

#include <string.h>

#include "argmax.h"
#include "buffer.h"
#include "kernels.h"
#include "threads.h"
#include "tiles.h"

namespace {

constexpr int64_t kStep = kPair * kTileInner;  // elements of 32 rows, or of a panel, in 32 inputs
// Bounds of the maximum rows in a loop's item. Within them, an item has as many rows as stay in the
// L2 cache, with all inputs or those of a sweep, while panels pass.
constexpr int64_t kFewestRows = 128;
constexpr int64_t kMostRows = 512;
// Shares per thread. Several even out slow threads, but each share reads its rows into the cache
// anew.
constexpr int64_t kShares = 2;

// Limits that suit the caches.
struct Limits {
  int64_t steps;     // of the part of a panel that stays in the L1 cache
  int64_t elements;  // of the rows that stay in the L2 cache
  int64_t panels;    // of a share whose sums wait for the next sweep
  int64_t rows = kFewestRows;
};

// One item of the parallel loop: rows start to end - 1, panels first to last - 1.
struct Share {
  int64_t start, end;
  int64_t first, last;
};

// Complete products of up to 32 rows and one panel, to which the epilogue is due.
struct Finished {
  const float *products;
  int64_t row, count;
  int64_t panel;
  const float *row_scales = nullptr;  // factors of all rows, whose products are int32 then
};

// Returns whether the result bypasses the caches; never if products are added to `out`.
inline bool passes_caches(const tw_linear &a) {
  bool whole_lines = a.outputs % kPair == 0 && a.out_stride % kPair == 0 &&
                     reinterpret_cast<uintptr_t>(a.out) % 64 == 0;
  return a.epilogue == TW_STORE && whole_lines && a.num_rows * a.outputs * 2 > kMostCached;
}

inline bool is_gate(int32_t epilogue) {
  return epilogue == TW_GATE || (epilogue >= TW_GATE_GELU && epilogue <= TW_GATE_CLAMPED);
}

inline __m512 activate(__m512 values, int32_t epilogue) {
  if (epilogue == TW_GATE) return silu(values);
  return epilogue == TW_GELU || epilogue == TW_GATE_GELU ? gelu(values) : gelu_tanh(values);
}

// Computes TW_GATE_CLAMPED. A NaN stays one: the minimum of two is the second if either is a NaN.
inline __m512 clamped(__m512 gate, __m512 up, __m512 alpha, __m512 limit) {
  gate = _mm512_min_ps(limit, gate);
  up = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), limit), _mm512_min_ps(limit, up));
  const __m512 opened = _mm512_div_ps(silu(_mm512_mul_ps(alpha, gate)), alpha);
  return _mm512_fmadd_ps(opened, up, opened);
}

// Applies the epilogue to rows `from` to `to` - 1, as far as they exist.
inline void finish_rows(const tw_linear &a, const Finished &finished, int64_t from, int64_t to) {
  to = smaller(to, finished.count);
  if (from >= to) return;
  // Copies, because for the compiler a store to `out` may change `a`.
  const int32_t epilogue = a.epilogue;
  const int64_t outputs = a.outputs, stride = a.out_stride;
  const int64_t column = finished.panel * kPair, left = outputs - column;
  const float *scales = a.scales ? a.scales + column : nullptr;
  const float *row_scales = finished.row_scales;
  const float *bias = a.bias ? a.bias + column : nullptr;
  const __m512 alpha = _mm512_set1_ps(a.alpha), limit = _mm512_set1_ps(a.limit);
  const float *product = finished.products + from * kPair;
  void *const all = a.out;
  Largest *const found =
      epilogue == TW_ARGMAX ? static_cast<Largest *>(largest.reserve(0)) : nullptr;
  const bool streams = passes_caches(a);
  const uint32_t mask = left >= kPair ? 0xffffffffu : (1u << left) - 1;
  for (int64_t row = finished.row + from; row < finished.row + to; row++, product += kPair) {
    __m512 low = _mm512_load_ps(product), high = _mm512_load_ps(product + kTileRows);
    if (row_scales) {
      const __m512 scale = _mm512_set1_ps(row_scales[row]);
      low = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(low)), scale);
      high = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(high)), scale);
    }
    if (scales) {
      low = _mm512_mul_ps(low, _mm512_loadu_ps(scales));
      high = _mm512_mul_ps(high, _mm512_loadu_ps(scales + kTileRows));
    }
    if (bias) {
      low = _mm512_add_ps(low, _mm512_loadu_ps(bias));
      high = _mm512_add_ps(high, _mm512_loadu_ps(bias + kTileRows));
    }
    if (is_gate(epilogue)) {
      __m512 gated = epilogue == TW_GATE_CLAMPED ? clamped(low, high, alpha, limit)
                                                 : _mm512_mul_ps(activate(low, epilogue), high);
      auto *out = static_cast<uint16_t *>(all) + tiled(row, column / 2, outputs / 2);
      _mm256_store_si256(reinterpret_cast<__m256i *>(out), to_bfloat16(gated));
    } else if (epilogue == TW_GELU || epilogue == TW_GELU_TANH) {
      auto *out = static_cast<uint16_t *>(all) + tiled(row, column, outputs);
      __m512bh line = _mm512_cvtne2ps_pbh(activate(high, epilogue), activate(low, epilogue));
      _mm512_store_si512(reinterpret_cast<__m512i *>(out), reinterpret_cast<__m512i>(line));
    } else if (epilogue == TW_ARGMAX) {
      search(found[row], column, low, high, mask);
    } else if (epilogue == TW_STORE_FLOAT32) {
      auto *out = static_cast<float *>(all) + row * stride + column;
      _mm512_mask_storeu_ps(out, static_cast<__mmask16>(mask), low);
      _mm512_mask_storeu_ps(out + kTileRows, static_cast<__mmask16>(mask >> 16), high);
    } else {
      auto *out = static_cast<uint16_t *>(all) + row * stride + column;
      if (epilogue == TW_ADD) {
        __m512i before = _mm512_maskz_loadu_epi16(mask, out);
        low = _mm512_add_ps(low, to_float(_mm512_castsi512_si256(before)));
        high = _mm512_add_ps(high, to_float(_mm512_extracti64x4_epi64(before, 1)));
      }
      // One store of a whole cache line.
      __m512bh line = _mm512_cvtne2ps_pbh(high, low);
      if (streams)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(out), reinterpret_cast<__m512i>(line));
      else
        _mm512_mask_storeu_epi16(out, mask, reinterpret_cast<__m512i>(line));
    }
  }
}

// Prefetches the scattered lines that finish_rows will write.
inline void prefetch_out(const tw_linear &a, int64_t row, int64_t end, int64_t panel) {
  if (is_gate(a.epilogue) || a.epilogue >= TW_ARGMAX) return;
  int64_t size = a.epilogue == TW_STORE_FLOAT32 ? 4 : 2, stride = a.out_stride * size;
  const char *out = static_cast<const char *>(a.out) + panel * kPair * size;
  for (; row < end; row++) _mm_prefetch(out + row * stride, _MM_HINT_T1);
}

// Order of a share's work: sweeps over the panels, each over the inputs of some steps, in parts.
struct Order {
  int64_t sweep, part;  // steps
  bool sweeps;          // several, so that sums wait

  Order(int64_t depth, int64_t blocks, const Limits &limits)
      : sweep(depth), part(depth), sweeps(false) {
    if (blocks > 1) sweep = evenly(depth, limits.elements / (blocks * kStep));
    part = evenly(sweep, limits.steps);
    sweeps = sweep < depth;
  }

  // Returns the size of equal pieces of `steps`, at most `most`; the last piece may be smaller.
  static int64_t evenly(int64_t steps, int64_t most) {
    return divide_up(steps, divide_up(steps, larger(most, 1)));
  }
};

// Some steps of a panel, within a sweep that starts with step `sweep` of every panel.
struct Part {
  int64_t sweep, panel;
  int64_t step, steps;
};

// Returns the next part. After the last it has no steps and its sweep starts at `depth`.
inline Part after(Part at, const Share &share, const Order &order, int64_t depth) {
  int64_t end = smaller(at.sweep + order.sweep, depth);
  at.step += at.steps;
  if (at.step == end) {
    if (++at.panel == share.last) {
      at.panel = share.first;
      at.sweep = end;
      end = smaller(at.sweep + order.sweep, depth);
    }
    at.step = at.sweep;
  }
  at.steps = smaller(order.part, end - at.step);
  return at;
}

// Sums of the thread's current item.
thread_local Buffer products;

// Distributes the product over threads; multiply(share, order, sums) computes one share.
template <typename Multiply>
void distribute(const tw_linear &a, const Limits &limits, const Multiply &multiply) {
  const int64_t end = a.last_panel ? a.last_panel : divide_up(a.outputs, kPair);
  int64_t panels = end - a.first_panel, shares = kShares * num_threads();
  int64_t most = limits.elements / a.inputs / kPair * kPair;
  most = larger(smaller(most, kMostRows), limits.rows);
  int64_t chunks = divide_up(a.num_rows, most);
  int64_t rows = divide_up(divide_up(a.num_rows, chunks), kPair) * kPair, blocks = rows / kPair;
  const Order order(a.inputs / kTileInner, blocks, limits);
  // Neighbouring panels go to one thread, for sequential reads.
  int64_t width = larger(panels / divide_up(shares, chunks), 1);
  if (order.sweeps) width = smaller(width, limits.panels);
  int64_t columns = divide_up(panels, width);
  int64_t sums = order.sweeps ? width * blocks : larger(blocks, 2);
  auto *best = a.epilogue == TW_ARGMAX ? static_cast<uint64_t *>(a.out) : nullptr;
  if (best) memset(best, 0, static_cast<size_t>(a.num_rows) * sizeof *best);
  parallel_for(chunks * columns, [&](int64_t item) {
    int64_t start = item / columns * rows, first = a.first_panel + item % columns * width;
    Share share{start, smaller(start + rows, a.num_rows), first, smaller(first + width, end)};
    const Largest *found = best ? begin_search(a, share.start, share.end) : nullptr;
    multiply(share, order, static_cast<float *>(products.reserve(sums * kPair * kPair * 4)));
    if (best) end_search(found, share.start, share.end, best);
    _mm_sfence();  // completes stores that bypass the caches before the item counts as done
  });
  if (best)
    for (int64_t row = 0; row < a.num_rows; row++) best[row] = column_of(best[row]);
}

}  // namespace
