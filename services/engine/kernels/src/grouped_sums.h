// Whole-number products of rows and blocks of weights.
#pragma once

#include "grouped_blocks.h"
#include "grouped_forms.h"
#include "grouped_rows.h"
#include "grouped_vectors.h"

namespace {

#if defined(TW_HAS_VECTORS)

// Has the compiler add here: it would compute all products before it adds them, and spill them.
#if defined(__AVX2__)
TW_INLINE void in_order(Integers &sum) { asm volatile("" : "+x"(sum)); }
#else
TW_INLINE void in_order(Integers &sum) { asm volatile("" : "+w"(sum.low), "+w"(sum.high)); }
#endif

// Returns what the sums of a run and a row start with.
TW_INLINE Integers start(const RowBlock &rows, int run, int r) {
  return broadcast_bits(rows.starts + run * kRowsAtOnce + r);
}

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__) || defined(__aarch64__)

#if defined(__aarch64__)

// Adds to each lane of `sum` the products of its four bytes and four others. All have a sign.
TW_INLINE int32x4_t add_lanes(int32x4_t sum, int32x4_t bytes, int32x4_t others) {
  const int8x16_t a = vreinterpretq_s8_s32(bytes), b = vreinterpretq_s8_s32(others);
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, a, b);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  return vpadalq_s16(sum, vpaddq_s16(low, high));  // 2 * 128 * 127 fits 16 bits
#endif
}

TW_INLINE Integers add_products(Integers sum, Integers bytes, Integers others) {
  return {add_lanes(sum.low, bytes.low, others.low), add_lanes(sum.high, bytes.high, others.high)};
}

#else

// Adds to each lane of `sum` the products of its four bytes without a sign and four with one.
TW_INLINE Integers add_products(Integers sum, Integers bytes, Integers signed_bytes) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sum, bytes, signed_bytes);
#else
  return _mm256_dpbusd_epi32(sum, bytes, signed_bytes);
#endif
}

#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)

// The sums of a pair of rows and the outputs of a strip: of each two outputs, both of the first row
// before both of the second.
struct PairSums {
  int32x4_t of[kStrip / 2];
};

// Adds the products of eight inputs. inputs: of the two rows; first, second: four inputs of each output.
TW_INLINE void add_eight(PairSums &sums, int8x16_t inputs, Integers first, Integers second) {
  const int32x4_t outputs[] = {vzip1q_s32(first.low, second.low), vzip2q_s32(first.low, second.low),
                               vzip1q_s32(first.high, second.high),
                               vzip2q_s32(first.high, second.high)};
#pragma GCC unroll 4
  for (int i = 0; i < kStrip / 2; i++)
    sums.of[i] = vmmlaq_s32(sums.of[i], inputs, vreinterpretq_s8_s32(outputs[i]));
}

// Returns the sums of one of the rows.
template <int kRow>
TW_INLINE Integers row_of(const PairSums &sums) {
  const auto join = [](int32x4_t a, int32x4_t b) {
    const int64x2_t left = vreinterpretq_s64_s32(a), right = vreinterpretq_s64_s32(b);
    return vreinterpretq_s32_s64(kRow ? vzip2q_s64(left, right) : vzip1q_s64(left, right));
  };
  return {join(sums.of[0], sums.of[1]), join(sums.of[2], sums.of[3])};
}

// Does sum_products for an even number of rows: two rows in each product of matrices.
template <typename Form, int kRows, typename Block>
TW_INLINE void sum_pairs(const Block &block, const RowBlock &rows, int part,
                         Integers (*sums)[kRows]) {
  constexpr int kEights = Form::kGroup / 8, kPairs = kRows / 2;
  PairSums pairs[kStrips][kPairs] = {};
#pragma GCC unroll 4
  for (int i = 0; i < kEights; i++) {
    const int k = part * kEights + i;
    int8x16_t inputs[kPairs];
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; p++) {
      const int8_t *from = rows.codes + 2 * p * kBlock + 8 * k;
      inputs[p] = vcombine_s8(vld1_s8(from), vld1_s8(from + kBlock));
    }
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; s++) {
      const Integers first = block.four(s, 2 * k), second = block.four(s, 2 * k + 1);
#pragma GCC unroll 2
      for (int p = 0; p < kPairs; p++) add_eight(pairs[s][p], inputs[p], first, second);
    }
  }
#pragma GCC unroll 2
  for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; p++) {
      sums[s][2 * p] = row_of<0>(pairs[s][p]);
      sums[s][2 * p + 1] = row_of<1>(pairs[s][p]);
      if (!Form::kStarts) continue;
#pragma GCC unroll 2
      for (int r = 2 * p; r < 2 * p + 2; r++) {
        const Integers begun = start(rows, part, r);
        sums[s][r] = {sums[s][r].low + begun.low, sums[s][r].high + begun.high};
      }
    }
}

#endif

// Computes the sums of products of rows with a part of a block: the inputs of a group.
template <typename Form, int kRows, typename Block>
TW_INLINE void sum_products(const Block &block, const RowBlock &rows, int part,
                            Integers (*sums)[kRows]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  if constexpr (kRows % 2 == 0) return sum_pairs<Form>(block, rows, part, sums);
#endif
  constexpr int kFours = Form::kGroup / 4;
#pragma GCC unroll 2
  for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++)
      sums[s][r] = Form::kStarts ? start(rows, part, r) : no_integers();
#pragma GCC unroll 8
  for (int i = 0; i < kFours; i++) {
    const int k = part * kFours + i;
    const Integers weights[kStrips] = {block.four(0, k), block.four(1, k)};
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const Integers row = broadcast_bits(rows.codes + r * kBlock + 4 * k);
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; s++) {
        sums[s][r] = add_products(sums[s][r], weights[s], row);
        in_order(sums[s][r]);
      }
    }
  }
}

#else  // products are summed in 16 bits

// Codes of 4 or 6 bits without a sign: the products of a run are summed in 16 bits.
template <typename Form, int kRows, typename Block>
TW_INLINE void sum_runs(const Block &block, const RowBlock &rows, int part,
                        Integers (*sums)[kRows]) {
  constexpr int kFours = 8 / Form::kRuns, kRunsEach = Form::kRuns / Form::kParts;
#pragma GCC unroll 2
  for (int i = 0; i < kRunsEach; i++) {
    const int run = part * kRunsEach + i;
    Integers run_sums[kStrips][kRows];
#pragma GCC unroll 8
    for (int j = 0; j < kFours; j++) {
      const int k = run * kFours + j;
      const Integers weights[kStrips] = {block.four(0, k), block.four(1, k)};
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        const Integers row = broadcast_bits(rows.codes + r * kBlock + 4 * k);
#pragma GCC unroll 2
        for (int s = 0; s < kStrips; s++) {
          Integers pairs = _mm256_maddubs_epi16(weights[s], row);
          if (j)
            pairs = _mm256_add_epi16(run_sums[s][r], pairs);
          else if (Form::kStarts)
            pairs = _mm256_add_epi16(start(rows, run, r), pairs);
          run_sums[s][r] = pairs;
          in_order(run_sums[s][r]);
        }
      }
    }
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; s++)
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        const Integers whole = _mm256_madd_epi16(run_sums[s][r], _mm256_set1_epi16(1));
        sums[s][r] = i ? _mm256_add_epi32(sums[s][r], whole) : whole;
      }
  }
}

// Codes of 8 bits with a sign. A product of bytes takes one without: the rows get the weights' sign.
template <typename Form, int kRows, typename Block>
TW_INLINE void sum_signed(const Block &block, const RowBlock &rows, int part,
                          Integers (*sums)[kRows]) {
  constexpr int kFours = Form::kGroup / 4;
#pragma GCC unroll 8
  for (int i = 0; i < kFours; i++) {
    const int k = part * kFours + i;
    const Integers weights[kStrips] = {block.four(0, k), block.four(1, k)};
    const Integers sizes[kStrips] = {_mm256_abs_epi8(weights[0]), _mm256_abs_epi8(weights[1])};
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const Integers row = broadcast_bits(rows.codes + r * kBlock + 4 * k);
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; s++) {
        const Integers pairs = _mm256_maddubs_epi16(sizes[s], _mm256_sign_epi8(row, weights[s]));
        const Integers whole = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        sums[s][r] = i ? _mm256_add_epi32(sums[s][r], whole) : whole;
        in_order(sums[s][r]);
      }
    }
  }
}

// Codes of 16 bits, two in a product.
template <typename Form, int kRows, typename Block>
TW_INLINE void sum_wide(const Block &block, const RowBlock &rows, int part,
                        Integers (*sums)[kRows]) {
  constexpr int kTwos = Form::kGroup / 2;
#pragma GCC unroll 16
  for (int i = 0; i < kTwos; i++) {
    const int k = part * kTwos + i;
    const Integers weights[kStrips] = {block.four(0, k), block.four(1, k)};
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const Integers row = broadcast_bits(rows.wide + r * kBlock + 2 * k);
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; s++) {
        const Integers whole = _mm256_madd_epi16(weights[s], row);
        sums[s][r] = i ? _mm256_add_epi32(sums[s][r], whole) : whole;
        in_order(sums[s][r]);
      }
    }
  }
}

// Computes the sums of products of rows with a part of a block: the inputs of a group.
template <typename Form, int kRows, typename Block>
TW_INLINE void sum_products(const Block &block, const RowBlock &rows, int part,
                            Integers (*sums)[kRows]) {
  if constexpr (Form::kIsWide)
    sum_wide<Form>(block, rows, part, sums);
  else if constexpr (Form::kSigned)
    sum_signed<Form>(block, rows, part, sums);
  else
    sum_runs<Form>(block, rows, part, sums);
}

#endif

#else  // any processor

// Computes the sums of products of rows with a part of a block: the inputs of a group.
template <typename Form, int kRows, typename Block>
inline void sum_products(const Block &block, const RowBlock &rows, int part,
                         Integers (*sums)[kRows]) {
  for (int s = 0; s < kStrips; s++)
    for (int r = 0; r < kRows; r++)
      for (int64_t lane = 0; lane < kStrip; lane++) {
        int32_t sum = Form::kStarts ? rows.starts[part * kRowsAtOnce + r] : 0;
        for (int64_t input = part * Form::kGroup; input < (part + 1) * Form::kGroup; input++)
          sum += block.code(s, lane, input) * rows.codes[r * kBlock + input];
        sums[s][r].lanes[lane] = sum;
      }
}

#endif

}  // namespace
