// Products with weights in float32, bfloat16 or float16, which are widened on the way. Sums are in
// float32, in the order of the inputs: a row's sums are independent of the number of rows.
#include "float_linear.h"

#include "buffer.h"
#include "exponential.h"
#include "float_vectors.h"
#include "scalars.h"
#include "threads.h"

namespace {

constexpr int32_t kWidened = -1;       // type of a half that is float32 already
constexpr int64_t kLine = 64;          // bytes of a cache line
constexpr int64_t kAhead = 4096;       // bytes between weights multiplied and prefetched
constexpr int64_t kPart = 128;         // inputs whose weights stay in the L1 cache while rows pass
constexpr int64_t kMostBlocks = 192 / kMostRows;  // blocks whose sums stay in the L2 cache
constexpr int64_t kMostPanels = 8;     // panels multiplied at once where inputs exceed kMostBytes
constexpr int64_t kMostBytes = 1 << 18;  // bytes of inputs that stay in the L2 cache
constexpr int64_t kHalfFloats = kPanel / kHalves;
constexpr int64_t kShares = 4;  // shares of the outputs for each thread

constexpr int64_t line_bytes(int32_t type) {
  return type == kWidened ? kHalfFloats * 4 : kPanel * bytes_of(type);
}

constexpr int64_t kFewRows = kMostRows / kHalves;  // rows whose sums of whole lines stay in registers

// Rows in blocks of at most kMostRows, as equal as they can be. A block's inputs follow each other,
// each with one number for each of the rows.
struct Blocks {
  const float *values;
  int64_t rows, inputs;
  int64_t count = (rows + kMostRows - 1) / kMostRows;

  // Returns the first row of a block.
  int64_t start(int64_t block) const {
    return block * (rows / count) + minimum(block, rows % count);
  }
  const float *at(int64_t block) const { return values + start(block) * inputs; }
};

// Weights to prefetch while others are multiplied: some bytes for each input.
struct Ahead {
  const uint8_t *at;
  int64_t step;
};

template <typename T>
void pack_block(const T *rows, int64_t count, int64_t inputs, float *to) {
  for (int64_t row = 0; row < count; row++) {
    const T *from = rows + row * inputs;
    for (int64_t input = 0; input < inputs; input++) to[input * count + row] = load(from[input]);
  }
}

template <typename T>
void pack_blocks(const tw_float_product &a, const Blocks &blocks, float *values) {
  parallel_for(blocks.count, a.num_rows * a.inputs, [&](int64_t block) {
    const int64_t first = blocks.start(block);
    pack_block(static_cast<const T *>(a.rows) + first * a.inputs, blocks.start(block + 1) - first,
               a.inputs, values + first * a.inputs);
  });
}

// Returns the rows of a product, valid until the thread's next call.
Blocks blocks_of(const tw_float_product &a) {
  static thread_local Buffer memory;
  Blocks blocks{static_cast<const float *>(a.rows), a.num_rows, a.inputs};
  if (a.num_rows == 1 && a.dtype == TW_FLOAT32) return blocks;
  auto *values = static_cast<float *>(memory.reserve(a.num_rows * a.inputs * 4));
  blocks.values = values;
  (a.dtype == TW_FLOAT32 ? pack_blocks<float> : pack_blocks<bfloat16>)(a, blocks, values);
  return blocks;
}

// Adds the products of a block and some lines of weights to `sums`: [kRows][kPanel]. kCount: vectors
// of a line that are multiplied, all or those of a half.
template <int32_t kType, int kRows, int kCount>
void multiply(const float *rows, const uint8_t *lines, int64_t inputs, int half, Ahead ahead,
              float *sums) {
  Vector totals[kRows][kCount];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kCount; v++) {
      const int at = kCount == kVectors ? v : vector_of(v, half);
      totals[r][v] = load(sums + r * kPanel + at * kLanes);
    }
  for (int64_t input = 0; input < inputs; input++) {
    __builtin_prefetch(ahead.at);
    if (kType == TW_FLOAT32 && kCount == kVectors) __builtin_prefetch(ahead.at + kLine);
    ahead.at += ahead.step;
    Vector weights[kCount];
    if (kType == kWidened) {
#pragma GCC unroll 8
      for (int v = 0; v < kCount; v++)
        weights[v] = load(reinterpret_cast<const float *>(lines) + v * kLanes);
    } else {
      widen<kType, kCount>(lines, half, weights);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      const Vector value = broadcast(rows[r]);
#pragma GCC unroll 8
      for (int v = 0; v < kCount; v++) totals[r][v] = fused(weights[v], value, totals[r][v]);
    }
    rows += kRows;
    lines += line_bytes(kType);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kCount; v++) {
      const int at = kCount == kVectors ? v : vector_of(v, half);
      store(sums + r * kPanel + at * kLanes, totals[r][v]);
    }
}

using Multiply = decltype(&multiply<TW_FLOAT32, 1, kVectors>);

// Kernels by the number of rows, less one.
template <int32_t kType, int kCount, int... kRows>
Multiply of_rows(int64_t rows) {
  constexpr Multiply kKernels[] = {multiply<kType, kRows, kCount>...};
  return kKernels[rows - 1];
}

template <int32_t kType>
Multiply whole_lines(int64_t rows) {
#if defined(__AVX512F__)
  return of_rows<kType, kVectors, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>(rows);
#else
  return of_rows<kType, kVectors, 1, 2, 3>(rows);
#endif
}

template <int32_t kType>
Multiply halves(int64_t rows) {
#if defined(__AVX512F__)
  return whole_lines<kType>(rows);
#else
  return of_rows<kType, kFew, 1, 2, 3, 4, 5, 6>(rows);
#endif
}

// Widens half of some lines to rows of kHalfFloats numbers.
template <int32_t kType>
void widen_lines(const uint8_t *lines, int64_t inputs, int half, float *to) {
  for (int64_t input = 0; input < inputs; input++) {
    Vector weights[kFew];
    widen<kType, kFew>(lines, half, weights);
#pragma GCC unroll 8
    for (int v = 0; v < kFew; v++) store(to + v * kLanes, weights[v]);
    to += kHalfFloats;
    lines += line_bytes(kType);
  }
}

// Multiplies one block of few rows by a panel, as it is read.
template <int32_t kType>
void few_rows(const Blocks &blocks, const uint8_t *panel, float *sums) {
  const Ahead ahead{panel + kAhead, line_bytes(kType)};
  whole_lines<kType>(blocks.rows)(blocks.values, panel, blocks.inputs, 0, ahead, sums);
}

// Some inputs of a panel, and where the next ones lie that are multiplied.
struct Part {
  const uint8_t *lines, *next;
  int64_t input, inputs;
};

// Multiplies blocks by a part. From some blocks on, weights are widened once. All blocks together
// prefetch the next part: memory is as busy while the last ones are multiplied.
template <int32_t kType>
void many_rows(const Blocks &blocks, int64_t first, int64_t last, const Part &part, float *sums) {
  alignas(64) static thread_local float widened[kPart * kHalfFloats];
  constexpr int64_t kFewestBlocks = kType == TW_BFLOAT16 ? 5 : 3;
  const bool widens = last - first >= kFewestBlocks;
  const int64_t before = blocks.start(first), passes = (last - first) * kHalves;
  Ahead ahead{part.next, (line_bytes(kType) + passes - 1) / passes};
  for (int half = 0; half < kHalves; half++) {
    if (widens) widen_lines<kType>(part.lines, part.inputs, half, widened);
    for (int64_t block = first; block < last; block++) {
      const int64_t start = blocks.start(block), rows = blocks.start(block + 1) - start;
      const float *values = blocks.at(block) + part.input * rows;
      float *const to = sums + (start - before) * kPanel;
      if (widens)
        halves<kWidened>(rows)(values, reinterpret_cast<const uint8_t *>(widened), part.inputs,
                               half, ahead, to);
      else
        halves<kType>(rows)(values, part.lines, part.inputs, half, ahead, to);
      ahead.at += ahead.step * part.inputs;
    }
  }
}

// Writes the products of some rows and a panel.
template <typename T>
void write(const tw_float_product &a, const float *sums, int64_t first, int64_t last,
           int64_t output) {
  const int64_t count = minimum(kPanel, a.outputs - output);
  const float *bias = a.bias ? a.bias + output : nullptr;
  for (int64_t row = first; row < last; row++, sums += kPanel) {
    T *to = static_cast<T *>(a.out) + row * a.out_stride + output;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
      const float value = sums[i] + (bias ? bias[i] : 0.0f);
      store(to + i, a.adds ? load(to[i]) + value : value);
    }
  }
}

// An item of the parallel loop: blocks first to last - 1, panels begin to end - 1.
struct Share {
  int64_t first, last;
  int64_t begin, end;
};

// Multiplies the panels of a share at once, part after part: the same inputs of its blocks stay in
// the L2 cache.
template <int32_t kType>
void multiply_panels(const tw_float_product &a, const Blocks &blocks, const Share &share,
                     float *sums) {
  const auto *packed = static_cast<const uint8_t *>(a.packed);
  const int64_t size = (blocks.start(share.last) - blocks.start(share.first)) * kPanel;
  const int64_t panel_bytes = line_bytes(kType) * a.inputs;
  for (int64_t input = 0; input < a.inputs; input += kPart) {
    const int64_t inputs = minimum(kPart, a.inputs - input);
    const int64_t from = input * line_bytes(kType), after = from + inputs * line_bytes(kType);
    for (int64_t panel = share.begin; panel < share.end; panel++) {
      const uint8_t *at = packed + panel * panel_bytes;
      const bool is_last = panel + 1 == share.end;
      const uint8_t *next = is_last ? packed + share.begin * panel_bytes + after
                                    : at + panel_bytes + from;
      many_rows<kType>(blocks, share.first, share.last, {at + from, next, input, inputs},
                       sums + (panel - share.begin) * size);
    }
  }
}

template <int32_t kType>
void linear(const tw_float_product &a) {
  const Blocks blocks = blocks_of(a);
  const int64_t panels = panels_of(a.outputs), bytes = line_bytes(kType) * a.inputs;
  const int64_t chunks = (blocks.count + kMostBlocks - 1) / kMostBlocks;
  const int64_t width = maximum(panels / (kShares * num_threads()), static_cast<int64_t>(1));
  const int64_t shares = (panels + width - 1) / width;
  const bool is_few = a.num_rows <= kFewRows;
  const bool stays = is_few || a.num_rows * a.inputs * 4 / chunks <= kMostBytes;
  const int64_t at_once = stays ? 1 : kMostPanels;
  const auto put = a.out_dtype == TW_FLOAT32 ? write<float> : write<bfloat16>;
  parallel_for(shares * chunks, [&](int64_t item) {
    static thread_local Buffer memory;
    const int64_t chunk = item / shares, begin = item % shares * width;
    const int64_t end = minimum(begin + width, panels);
    const int64_t first = chunk * blocks.count / chunks, last = (chunk + 1) * blocks.count / chunks;
    const int64_t row = blocks.start(first), size = (blocks.start(last) - row) * kPanel;
    auto *sums = static_cast<float *>(memory.reserve(at_once * size * 4));
    for (int64_t panel = begin; panel < end; panel += at_once) {
      const Share share{first, last, panel, minimum(panel + at_once, end)};
      memset(sums, 0, static_cast<size_t>((share.end - panel) * size) * 4);
      if (is_few)
        few_rows<kType>(blocks, static_cast<const uint8_t *>(a.packed) + panel * bytes, sums);
      else
        multiply_panels<kType>(a, blocks, share, sums);
      for (int64_t each = panel; each < share.end; each++)
        put(a, sums + (each - panel) * size, row, blocks.start(last), each * kPanel);
    }
  });
}

}  // namespace

void TW_MULTIPLY_FLOATS(const tw_float_product *call) {
  const tw_float_product a = *call;
  if (!a.num_rows) return;
  if (a.weight_dtype == TW_FLOAT32) return linear<TW_FLOAT32>(a);
  a.weight_dtype == TW_BFLOAT16 ? linear<TW_BFLOAT16>(a) : linear<TW_FLOAT16>(a);
}
