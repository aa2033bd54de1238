// Linear layers on AVX-512 BF16.
#include "avx512.h"
#include "int8.h"
#include "product.h"
#include "tiled.h"

namespace {

constexpr int64_t kMostSteps = 8;  // two parts of a panel share the L1 cache
// Of 1 MB of L2 cache; sums wait in it anyway.
constexpr Limits kLimits{kMostSteps, 256 << 10, 32};

// Fetches the part of a panel that is multiplied next, a little at a time.
class Fetch {
 public:
  // `lines` cache lines from `at` on, in so many calls of some(). What is read `once` passes by the
  // larger caches.
  Fetch(const void *at, int64_t lines, int64_t calls, bool once)
      : at_(static_cast<const char *>(at)),
        left_(lines),
        share_(divide_up(lines, calls)),
        once_(once) {}

  void some() {
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

// Fetches what the next group's rows have in a step: too short a piece for the core to foresee.
inline void fetch_rows(const uint16_t *rows) {
  for (int64_t r = 0; r < kGroup; r++)
    _mm_prefetch(reinterpret_cast<const char *>(rows + r * kTileInner), _MM_HINT_T0);
}

// A part of a panel, whose weights are multiplied as they are.
class Bfloat16Part {
 public:
  static constexpr int64_t kBytes = 2;  // of a weight

  void begin(const void *packed) { packed_ = static_cast<const uint16_t *>(packed); }

  // A step's tiles; `first` says that nobody has asked for them before.
  const uint16_t *tiles(int64_t step, bool) const { return packed_ + step * kStep; }

 private:
  const uint16_t *packed_ = nullptr;
};

// In bfloat16 the two bytes of n * kInt8Unit.
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

// The same of weights that are widened to bfloat16, which holds them exactly, just before use: with
// few rows, sums wait for each other, and there is time for it.
class Int8Part {
 public:
  static constexpr int64_t kBytes = 1;

  void begin(const void *packed) { packed_ = static_cast<const int8_t *>(packed); }

  const uint16_t *tiles(int64_t step, bool first) {
    const int64_t at = step * kStep;
    if (first)
      for (int64_t i = at; i < at + kStep; i += 64) widen(packed_ + i, widened_ + i);
    return widened_ + at;
  }

 private:
  // Widens 64 weights: each of the two bytes that one becomes is looked up.
  static void widen(const int8_t *from, uint16_t *to) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // as unpacking wants them
    __m512i weights = _mm512_permutexvar_epi64(order, _mm512_load_si512(from));
    __m512i size = _mm512_abs_epi8(weights);
    __m512i low = look_up(kBytesOf.low, size), high = look_up(kBytesOf.high, size);
    constexpr int kOrSign = 0xf8;  // the first, or both others
    high = _mm512_ternarylogic_epi32(high, weights, _mm512_set1_epi8(-128), kOrSign);
    _mm512_store_si512(to, _mm512_unpacklo_epi8(low, high));
    _mm512_store_si512(to + kTileInner, _mm512_unpackhi_epi8(low, high));
  }

  static __m512i look_up(const uint8_t *bytes, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), index,
                                    _mm512_load_si512(bytes + 64));
  }

  const int8_t *packed_ = nullptr;
  alignas(64) uint16_t widened_[kMostSteps * kStep];
};

// A part of a panel stays in the L1 cache and a sweep's rows in the L2 cache while they meet; sums
// wait in `products` meanwhile. A row's sum is the same however many rows there are: always in the
// order of the inputs, always in float32.
template <typename Weights>
void multiply(const tw_linear &a, const Share &share, const Order &order, float *products) {
  int64_t depth = a.inputs / kTileInner, blocks = divide_up(share.end - share.start, kPair);
  const auto *tiles = static_cast<const uint16_t *>(a.rows);
  auto packed = [&](const Part &part) {
    return static_cast<const char *>(a.packed) +
           (part.panel * depth + part.step) * kStep * Weights::kBytes;
  };
  bool once = share.end - share.start == a.num_rows;  // no other item reads the same weights
  alignas(64) float whole[kPair * kPair];
  Weights weights;
  Part part{0, share.first, 0, smaller(order.part, order.sweep)};
  while (part.sweep < depth) {
    Part next = after(part, share, order, depth);
    weights.begin(packed(part));
    Fetch fetch(packed(next), next.steps * kStep * Weights::kBytes / 64,
                divide_up(share.end - share.start, kGroup) * part.steps, once);
    bool last = part.step + part.steps == depth;
    for (int64_t block = 0; block < blocks; block++) {
      int64_t row = share.start + block * kPair, count = smaller(share.end - row, kPair);
      const uint16_t *rows = tiles + (row / kPair * depth + part.step) * kStep;
      int64_t slot = order.sweeps ? (part.panel - share.first) * blocks + block : block;
      float *sums = products + slot * kPair * kPair, *to = last ? whole : sums;
      if (last && !passes_caches(a)) fetch_out(a, row, row + count, part.panel);
      for (int64_t r = 0; r < count; r += kGroup) {
        const uint16_t *group = rows + r * kTileInner, *following = group + kGroup * kTileInner;
        if (r + kGroup >= count) following = block + 1 < blocks ? rows + depth * kStep : nullptr;
        auto factors = [&](int64_t step) {
          fetch.some();
          if (following) fetch_rows(following + step * kStep);
          const uint16_t *tile = weights.tiles(step, block == 0 && r == 0);
          return Factors{group + step * kStep, kTileInner, tile, tile + kTile};
        };
        multiply_group(smaller(kGroup, count - r), part.step ? sums + r * kPair : nullptr,
                       to + r * kPair, kPair, part.steps, factors);
      }
      if (last) finish_rows(a, {whole, row, count, part.panel}, 0, count);
    }
    part = next;
  }
}

}  // namespace

void avx512_linear(const tw_linear *linear) {
  const tw_linear &a = *linear;
  share_out(a, kLimits, [&](const Share &share, const Order &order, float *sums) {
    if (a.scales)
      multiply<Int8Part>(a, share, order, sums);
    else
      multiply<Bfloat16Part>(a, share, order, sums);
  });
}
