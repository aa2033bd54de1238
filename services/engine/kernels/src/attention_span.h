// Spans of cached keys and values: what a row sees of them, their last values, and their prefetch as
// suits the instruction set.
#pragma once

#include <immintrin.h>

#include "powers.h"
#include "tiles.h"
#if defined(__AMX_BF16__)
#include "amx.h"
#else
#include "avx512.h"
#endif

namespace {

// Keys of a chunk in one span: its working set stays near the L1 cache.
constexpr int64_t kChunkKeys = 128;
constexpr int64_t kMostKeys = larger(kDecodeKeys, kChunkKeys);

// Keys that one update of the weighted values covers, and the tiles of each 32 of them.
struct Span {
  int64_t first = 0, count = 0;
  int64_t num_steps = 0;
  const uint16_t *keys[kMostKeys / kTileInner];
  const uint16_t *values[kMostKeys / kTileInner];
};

// Keys of a span that are scored together: steps `step` to `end` - 1.
struct Scored {
  int64_t first;  // key
  int64_t step, end;

  int64_t width() const { return (end - step) * kTileInner; }
};

// Keys scored together that a row sees: first to last - 1.
struct Visible {
  int first, last;

  __mmask16 lanes(int64_t i) const {
    const __m512i index = _mm512_add_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(static_cast<int>(i)));
    return _mm512_cmplt_epi32_mask(index, _mm512_set1_epi32(last)) &
           _mm512_cmpge_epi32_mask(index, _mm512_set1_epi32(first));
  }
};

// Copies the value tiles of 32 tokens to `to`, with zeros for tokens from `count` on, and returns it.
inline const uint16_t *clean(const uint16_t *from, int64_t count, int64_t width, uint16_t *to) {
  for (int64_t tile = 0; tile < width / kTileRows; tile++)
    for (int64_t pair = 0; pair < kTileRows; pair++) {
      int64_t left = count - 2 * pair;  // tokens of a pair alternate
      __mmask32 kept = left >= 2 ? 0xffffffff : left == 1 ? 0x55555555 : 0;
      int64_t at = tile * kTile + pair_row(pair) * kPair;
      _mm512_store_si512(to + at, _mm512_maskz_loadu_epi16(kept, from + at));
    }
  return to;
}

// Prefetch of a span, a little at a time: block after block, or along all blocks at once
// (kPrefetchesAlong).
class Prefetch {
 public:
  // Covers `key_lines` lines of each step's keys and `value_lines` of its values in `calls` calls of
  // advance().
  Prefetch(const Span &span, int64_t key_lines, int64_t value_lines, int64_t calls)
      : span_(span),
        key_lines_(key_lines),
        value_lines_(value_lines),
        lines_(larger(key_lines, value_lines)),
        left_(span.num_steps ? lines_ : 0),
        share_(divide_up(left_, calls)) {}

  void advance() {
    int64_t end = line_ + smaller(share_, left_);
    left_ -= end - line_;
    if (kPrefetchesAlong) {
      for (; line_ < end; line_++)
        for (int64_t step = 0; step < span_.num_steps; step++) prefetch(step, line_);
    } else {
      for (int64_t i = line_ * span_.num_steps; i < end * span_.num_steps; i++)
        prefetch(i / lines_, i % lines_);
      line_ = end;
    }
  }

 private:
  void prefetch(int64_t step, int64_t line) const {
    if (line < key_lines_) prefetch_line(span_.keys[step] + line * kTileInner);
    if (line < value_lines_) prefetch_line(span_.values[step] + line * kTileInner);
  }

  const Span &span_;
  const int64_t key_lines_, value_lines_, lines_;
  int64_t line_ = 0, left_, share_;
};

}  // namespace
