// Linear layers on AMX with int8 weights, widened to bfloat16 just before use.
#include "amx_product.h"
#include "int8.h"

namespace {

// Weights of a part, widened to bfloat16 without loss while the previous part is multiplied: the
// vector units are idle then.
class Weights {
 public:
  static constexpr int64_t kMostSteps = 8;  // of a part: two parts share the L1 cache

  Weights(const void *packed, int64_t depth, int64_t blocks, const Part &first)
      : packed_(static_cast<const int8_t *>(packed)), depth_(depth), blocks_(blocks) {
    plan(first, 1);
    for (int64_t line = 0; line < lines_; line++)
      _mm_prefetch(from_ + line * kLine, _MM_HINT_T0);
    prepare(0);
  }

  const uint16_t *take(const Part &part, const Part &next) {
    const uint16_t *tiles = to_;
    turn_ = 1 - turn_;
    plan(next, blocks_ * part.steps);
    return tiles;
  }

  void prepare(int64_t piece) {
    int64_t end = smaller((piece + 1) * share_, lines_);
    for (int64_t line = piece * share_; line < end; line++) {
      const int8_t *from = from_ + line * kLine;
      uint16_t *to = to_ + line * kLine;
      _mm_prefetch(from + kAhead, _MM_HINT_T1);
      widen(from, to);
      widen(from + kLine / 2, to + kLine / 2);
    }
  }

 private:
  static constexpr int64_t kLine = 64;         // weights in a cache line
  static constexpr int64_t kAhead = 8 * kStep;

  void plan(const Part &part, int64_t pieces) {
    from_ = packed_ + (part.panel * depth_ + part.step) * kStep;
    to_ = widened[turn_];
    lines_ = part.steps * kStep / kLine;
    share_ = divide_up(lines_, pieces);
  }

  // Widens 32 weights via float16, for which there is an instruction. Shifted so that the upper
  // bits of its significand become bfloat16's, its exponent has another bias, which kInt8Unit
  // corrects.
  static void widen(const int8_t *from, uint16_t *to) {
    const __m512i spread = _mm512_set_epi64(0x1f001e001d001c00, 0x1b001a0019001800,
                                            0x1700160015001400, 0x1300120011001000,
                                            0x0f000e000d000c00, 0x0b000a0009000800,
                                            0x0700060005000400, 0x0300020001000000);
    __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i *>(from));
    // Weights times 256, so that only products with activations below 2^-22 underflow float32.
    __m512i words = _mm512_maskz_permutexvar_epi8(0xaaaaaaaaaaaaaaaa, spread,
                                                  _mm512_castsi256_si512(bytes));
    __m512i half;
    asm("vcvtw2ph %1, %0" : "=v"(half) : "v"(words));  // an intrinsic only since GCC 12
    __m512i value = _mm512_srai_epi16(half, 3);
    const __m512i sign_and_rest = _mm512_set1_epi16(static_cast<int16_t>(0x8fff));
    _mm512_store_si512(to, _mm512_and_si512(value, sign_and_rest));
  }

  alignas(64) static thread_local uint16_t widened[2][kMostSteps * kStep];

  const int8_t *packed_;
  int64_t depth_, blocks_;
  int turn_ = 0;
  const int8_t *from_ = nullptr;  // part to widen
  uint16_t *to_ = nullptr;        // its destination
  int64_t lines_ = 0, share_ = 0;  // lines of the part, and of each piece of it
};

alignas(64) thread_local uint16_t Weights::widened[2][kMostSteps * kStep];

// Multiplies part after part, as with bfloat16 weights (amx_linear.cpp): one part is widened while
// the previous one is multiplied.
void multiply(const tw_linear &a, const Share &share, const Order &order, float *products) {
  int64_t depth = a.inputs / kTileInner, blocks = divide_up(share.end - share.start, kPair);
  const auto *tiles = static_cast<const uint16_t *>(a.rows);
  bool stays = blocks == 1 && !order.sweeps;  // a panel's sums stay in their tiles to the end
  int64_t configured = 0;
  Finished finished{};
  Part part{0, share.first, 0, smaller(order.part, order.sweep)};
  Weights weights(a.packed, depth, blocks, part);
  while (part.sweep < depth) {
    Part next = after(part, share, order, depth);
    const uint16_t *panel = weights.take(part, next);
    int64_t rows_a_step = divide_up(kPair, part.steps);
    bool last = part.step + part.steps == depth;
    for (int64_t block = 0; block < blocks; block++) {
      int64_t row = share.start + block * kPair, count = smaller(share.end - row, kPair);
      if (count != configured) configure_tiles(configured = count);
      int64_t slot = order.sweeps ? (part.panel - share.first) * blocks + block
                     : blocks > 1 ? block
                                  : part.panel % 2;
      float *sums = products + slot * kPair * kPair;
      if (part.step == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      } else if (!stays) {
        load_products(sums);
      }
      auto meanwhile = [&](int64_t step) {
        weights.prepare(block * part.steps + step);
        int64_t from = step * rows_a_step, to = from + rows_a_step;
        if (last) prefetch_out(a, row + from, row + smaller(to, count), part.panel);
        finish_rows(a, finished, from, to);
      };
      const uint16_t *rows = tiles + (row / kPair * depth + part.step) * kStep;
      if (blocks > 1 || count > kTileRows)
        multiply_tiles<true>(rows, panel, part.steps, meanwhile);
      else
        multiply_tiles<false>(rows, panel, part.steps, meanwhile);
      if (!stays || last) store_products(sums);
      finished = {sums, row, last ? count : 0, part.panel};
    }
    part = next;
  }
  finish_rows(a, finished, 0, kPair);
}

}  // namespace

void amx_linear_int8(const tw_linear &a) {
  const Limits limits{Weights::kMostSteps, kMostElements, kMostPanels};
  distribute(a, limits, [&](const Share &share, const Order &order, float *sums) {
    multiply(a, share, order, sums);
    _tile_release();
  });
}
