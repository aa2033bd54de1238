// Linear layers on AVX-512 BF16.
#include "avx512.h"
#include "coded.h"
#include "int8.h"
#include "product.h"
#include "tiled.h"

namespace {

// Limits for an L2 cache of 1 MB, which also holds the waiting sums.
constexpr int64_t kMostElements = 256 << 10;
constexpr int64_t kMostPanels = 32;
// Steps of a part. Longer parts load and store sums less often. With few rows the sums are near,
// and shorter parts let the next one fit in the L1 cache too.
constexpr int64_t kMostSteps = 16;
constexpr int64_t kFewRows = 4 * kPair;

// Prefetch of the next part of a panel, a little at a time.
class Prefetch {
 public:
  // Covers `lines` cache lines from `at` on in `calls` calls of advance(). Data read `once` bypass
  // the larger caches.
  Prefetch(const void *at, int64_t lines, int64_t calls, bool once)
      : at_(static_cast<const char *>(at)),
        left_(lines),
        share_(divide_up(lines, calls)),
        once_(once) {}

  void advance() {
    const char *end = at_ + smaller(share_, left_) * 64;
    left_ -= share_;
    if (once_)
      for (; at_ < end; at_ += 64) _mm_prefetch(at_, _MM_HINT_NTA);
    else
      for (; at_ < end; at_ += 64) _mm_prefetch(at_, _MM_HINT_T0);
  }

 private:
  const char *at_;
  int64_t left_, share_;
  bool once_;
};

// Prefetches the next group's rows of a step, which are too short for the core's own prefetcher.
inline void prefetch_rows(const uint16_t *rows) {
  for (int64_t r = 0; r < kGroup; r++)
    _mm_prefetch(reinterpret_cast<const char *>(rows + r * kTileInner), _MM_HINT_T0);
}

// Sums of a group's rows with a panel. `from`: sums of the previous part, null for the first.
struct Sums {
  int64_t rows;
  const float *from;
  float *to;
};

template <typename Steps>
inline void multiply_group(const Sums &sums, int64_t steps, const Steps &factors) {
  multiply_group(sums.rows, sums.from, sums.to, kPair, steps, factors);
}

// Returns the factors of a step with uncompressed weights.
inline Factors plain(const uint16_t *rows, const uint16_t *tiles) {
  return {rows, kTileInner, tiles, tiles + kTile};
}

// A part of a panel with bfloat16 weights.
class Bfloat16Part {
 public:
  static constexpr int64_t kStepBytes = 2 * kStep;
  static constexpr int64_t kStepsOfFew = 8;  // steps of a part for few rows

  void begin(const void *packed) { packed_ = static_cast<const uint16_t *>(packed); }

  // Multiplies the first group by this part; `more` says whether others follow.
  template <typename Rows>
  void first(const Sums &sums, int64_t steps, const Rows &rows, bool) const {
    multiply_group(sums, steps,
                   [&](int64_t step) TW_ALWAYS_INLINE { return again(step, rows(step)); });
  }

  // Returns the factors for a later group's rows.
  Factors again(int64_t step, const uint16_t *rows) const {
    return plain(rows, packed_ + step * kStep);
  }

 private:
  const uint16_t *packed_ = nullptr;
};

// Decodes the weights of two pairs of inputs.
TW_ALWAYS_INLINE inline Lines decode(const CodedStep &step, int64_t unit) {
  const CodedStep::Unit &from = step.units[unit];
  // Repeated four times, so that the index bits above a code have no effect.
  __m512i high =
      _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i *>(step.high)));
  __m512i codes = _mm512_load_si512(from.codes);
  __m512i first = _mm512_permutexvar_epi8(codes, high);
  __m512i second = _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, 4), high);
  __m512i low[2] = {_mm512_load_si512(from.low[0]), _mm512_load_si512(from.low[1])};
  return {{_mm512_unpacklo_epi8(low[0], first), _mm512_unpacklo_epi8(low[1], second)},
          {_mm512_unpackhi_epi8(low[0], first), _mm512_unpackhi_epi8(low[1], second)}};
}

// Both bytes of n * kInt8Unit in bfloat16.
struct alignas(64) Bytes {
  uint8_t low[128] = {}, high[128] = {};

  constexpr Bytes() {
    for (int n = 1; n < 128; n++) {
      int exponent = 127 + kInt8UnitExponent, significand = n;
      for (; significand < 128; exponent--) significand *= 2;
      exponent += 7;
      low[n] = static_cast<uint8_t>((exponent & 1) << 7 | (significand & 0x7f));
      high[n] = static_cast<uint8_t>(exponent >> 1);
    }
  }
};
constexpr Bytes kBytesOf;

inline __m512i look_up(const uint8_t *bytes, __m512i index) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), index, _mm512_load_si512(bytes + 64));
}

// Widens two lines from int8 to bfloat16 without loss.
TW_ALWAYS_INLINE inline void widen(const int8_t *from, __m512i *to) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // for unpacking
  __m512i weights = _mm512_permutexvar_epi64(order, _mm512_load_si512(from));
  __m512i size = _mm512_abs_epi8(weights);
  __m512i low = look_up(kBytesOf.low, size), high = look_up(kBytesOf.high, size);
  constexpr int kOrSign = 0xf8;  // a | (b & c)
  high = _mm512_ternarylogic_epi32(high, weights, _mm512_set1_epi8(-128), kOrSign);
  to[0] = _mm512_unpacklo_epi8(low, high);
  to[1] = _mm512_unpackhi_epi8(low, high);
}

struct Int8Step {
  int8_t left[kTile], right[kTile];
};

TW_ALWAYS_INLINE inline Lines decode(const Int8Step &step, int64_t unit) {
  Lines lines;
  widen(step.left + unit * 2 * kPair, lines.left);
  widen(step.right + unit * 2 * kPair, lines.right);
  return lines;
}

// Stores decoded lines of a step for other rows.
TW_ALWAYS_INLINE inline void keep(const Lines &lines, int64_t pair, uint16_t *tiles) {
  for (int64_t i = 0; i < 2; i++) {
    uint16_t *left = tiles + (pair + i) * kPair;
    _mm512_store_si512(left, lines.left[i]);
    _mm512_store_si512(left + kTile, lines.right[i]);
  }
}

// Factors of a step whose weights are decoded as they are read.
template <typename Step>
struct Decoding {
  static constexpr int64_t row_stride = kTileInner;

  const uint16_t *rows;
  const Step &step;
  uint16_t *kept;  // where to store decoded weights for other rows, or null
};

template <typename Step>
TW_ALWAYS_INLINE inline Lines lines_of(const Decoding<Step> &at, int64_t pair) {
  Lines lines = decode(at.step, pair / 2);
  if (at.kept) keep(lines, pair, at.kept);
  return lines;
}

// A part of a panel with encoded weights, which multiplying the first group decodes. The L1 cache
// then holds them in both forms.
template <typename Step, int64_t kSteps>
class DecodedPart {
 public:
  static constexpr int64_t kStepBytes = sizeof(Step);
  static constexpr int64_t kStepsOfFew = kSteps;

  void begin(const void *packed) { steps_ = static_cast<const Step *>(packed); }

  template <typename Rows>
  void first(const Sums &sums, int64_t steps, const Rows &rows, bool more) {
    multiply_group(sums, steps, [&](int64_t step) TW_ALWAYS_INLINE {
      return Decoding<Step>{rows(step), steps_[step], more ? tiles_ + step * kStep : nullptr};
    });
  }

  Factors again(int64_t step, const uint16_t *rows) const {
    return plain(rows, tiles_ + step * kStep);
  }

 protected:
  const Step *steps_ = nullptr;
  alignas(64) uint16_t tiles_[kMostSteps * kStep];
};

using Int8Part = DecodedPart<Int8Step, 8>;

// A part with compressed weights. If it has exceptions, it is decoded before it is multiplied.
class CodedPart : public DecodedPart<CodedStep, 4> {
 public:
  explicit CodedPart(const CodedException *exceptions) : exceptions_(exceptions) {}

  template <typename Rows>
  void first(const Sums &sums, int64_t steps, const Rows &rows, bool more) {
    if (!has_exceptions(steps)) return DecodedPart::first(sums, steps, rows, more);
    for (int64_t step = 0; step < steps; step++) decode_step(steps_[step], tiles_ + step * kStep);
    multiply_group(sums, steps,
                   [&](int64_t step) TW_ALWAYS_INLINE { return again(step, rows(step)); });
  }

 private:
  bool has_exceptions(int64_t steps) const {
    uint32_t number = 0;
    for (int64_t step = 0; step < steps; step++) number |= steps_[step].num_exceptions;
    return number;
  }

  void decode_step(const CodedStep &step, uint16_t *to) {
    for (int64_t unit = 0; unit < CodedStep::kUnits; unit++) keep(decode(step, unit), 2 * unit, to);
    const CodedException *exceptions = exceptions_of(step, exceptions_);
    for (uint32_t i = 0; i < step.num_exceptions; i++)
      to[exceptions[i].place] = exceptions[i].weight;
  }

  const CodedException *exceptions_;
};

// A part of a panel stays in the L1 cache and a sweep's rows in the L2 cache; partial sums wait in
// `products`. A row's sum is independent of the number of rows: float32 additions in the order of
// the inputs.
template <typename Weights>
void multiply(const tw_linear &a, const Share &share, const Order &order, Weights &weights,
              float *products) {
  int64_t depth = a.inputs / kTileInner, blocks = divide_up(share.end - share.start, kPair);
  const auto *tiles = static_cast<const uint16_t *>(a.rows);
  auto packed = [&](const Part &part) {
    return static_cast<const char *>(a.packed) +
           (part.panel * depth + part.step) * Weights::kStepBytes;
  };
  bool once = share.end - share.start == a.num_rows;  // no other item reads the same weights
  alignas(64) float whole[kPair * kPair];
  Part part{0, share.first, 0, smaller(order.part, order.sweep)};
  while (part.sweep < depth) {
    Part next = after(part, share, order, depth);
    weights.begin(packed(part));
    Prefetch prefetch(packed(next), next.steps * Weights::kStepBytes / 64,
                divide_up(share.end - share.start, kGroup) * part.steps, once);
    bool last = part.step + part.steps == depth;
    for (int64_t block = 0; block < blocks; block++) {
      int64_t row = share.start + block * kPair, count = smaller(share.end - row, kPair);
      const uint16_t *rows = tiles + (row / kPair * depth + part.step) * kStep;
      int64_t slot = order.sweeps ? (part.panel - share.first) * blocks + block : block;
      float *sums = products + slot * kPair * kPair, *to = last ? whole : sums;
      if (last && !passes_caches(a)) prefetch_out(a, row, row + count, part.panel);
      for (int64_t r = 0; r < count; r += kGroup) {
        const uint16_t *group = rows + r * kTileInner, *following = group + kGroup * kTileInner;
        if (r + kGroup >= count) following = block + 1 < blocks ? rows + depth * kStep : nullptr;
        auto rows_of = [&](int64_t step) TW_ALWAYS_INLINE {
          prefetch.advance();
          if (following) prefetch_rows(following + step * kStep);
          return group + step * kStep;
        };
        const Sums at{smaller(kGroup, count - r), part.step ? sums + r * kPair : nullptr,
                      to + r * kPair};
        if (block == 0 && r == 0)
          weights.first(at, part.steps, rows_of, following);
        else
          multiply_group(at, part.steps, [&](int64_t step) TW_ALWAYS_INLINE {
            return weights.again(step, rows_of(step));
          });
      }
      if (last) finish_rows(a, {whole, row, count, part.panel}, 0, count);
    }
    part = next;
  }
}

template <typename Weights>
void multiply(const tw_linear &a, const Weights &weights) {
  int64_t steps = a.num_rows > kFewRows ? kMostSteps : Weights::kStepsOfFew;
  distribute(a, {steps, kMostElements, kMostPanels},
            [&](const Share &share, const Order &order, float *sums) {
              Weights own = weights;
              multiply(a, share, order, own, sums);
            });
}

}  // namespace

void avx512_linear(const tw_linear *linear) {
  switch (linear->format) {
    case TW_INT8: return multiply(*linear, Int8Part());
    case TW_CODED: return multiply(*linear, CodedPart(exceptions_after(*linear)));
    case TW_GROUPS: return avx512_groups_linear(linear);
    case TW_BYTES: return avx512_bytes_linear(linear);
    default: return multiply(*linear, Bfloat16Part());
  }
}
