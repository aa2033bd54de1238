// Linear layers on AMX with weights that are decoded to bfloat16 just before use.
#include "amx_product.h"
#include "grouped_codes.h"
#include "int8.h"
#include "rounded_rows.h"
#include "tiled.h"

namespace {

// int8 weights, widened without loss.
class Int8Decoder {
 public:
  static constexpr int64_t kPieces = kStep / kLine;  // of a step: a cache line each

  explicit Int8Decoder(const tw_linear &a)
      : packed_(static_cast<const int8_t *>(a.packed)), depth_(a.inputs / kTileInner) {}

  void begin(int64_t panel) const {
    const int8_t *from = packed_ + panel * depth_ * kStep;
    for (int64_t at = 0; at < kAhead; at += kLine) _mm_prefetch(from + at, _MM_HINT_T0);
  }

  void prepare(int64_t) const {}

  void decode(int64_t panel, int64_t step, int64_t piece, uint16_t *tiles) const {
    const int8_t *from = packed_ + (panel * depth_ + step) * kStep + piece * kLine;
    uint16_t *to = tiles + piece * kLine;
    _mm_prefetch(from + kAhead, _MM_HINT_T1);
    widen(from, to);
    widen(from + kLine / 2, to + kLine / 2);
  }

 private:
  static constexpr int64_t kAhead = 8 * kStep;

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

  const int8_t *packed_;
  int64_t depth_;
};

// Weights in groups, rounded to bfloat16.
template <int kCoding>
class GroupedDecoder {
 public:
  static constexpr int64_t kPieces = 4;  // of a step: 16 inputs of a tile each

  explicit GroupedDecoder(const tw_linear &a) : codes_(a) {}

  void begin(int64_t panel) const { codes_.begin(panel); }

  void prepare(int64_t panel) const { codes_.prepare(panel); }

  void decode(int64_t panel, int64_t step, int64_t piece, uint16_t *tiles) const {
    const int64_t tile = piece / 2, half = piece % 2;
    const Strips strips = codes_.strips(panel, tile);
    const Codes::Place at = codes_.place<kCoding>(step * kTileInner + half * kHalf);
    for (int64_t line = 0; line < kHalf * bits_of(kCoding); line += kLine)
      codes_.fetch(strips, at.codes + line);
    TileNumbers numbers = codes_.numbers<kCoding>(strips, at);
    if (!codes_.has_offsets())
      numbers.offset = _mm512_mul_ps(numbers.scale, _mm512_set1_ps(-zero_of(kCoding)));
    uint16_t *to = tiles + tile * kTile + half * (kTile / 2);
    codes_.expand_at<kCoding>(strips, at.codes, [&](int four, __m512i bytes) TW_ALWAYS_INLINE {
      uint16_t *lines = to + 2 * four * kPair;
      store_line(weigh<0>(bytes, numbers), weigh<1>(bytes, numbers), lines);
      store_line(weigh<2>(bytes, numbers), weigh<3>(bytes, numbers), lines + kPair);
    });
  }

 private:
  // Returns the weights of input `kInput` of four.
  template <int kInput>
  TW_ALWAYS_INLINE static __m512 weigh(__m512i bytes, const TileNumbers &numbers) {
    constexpr char i = kInput, no = -1;
    const __m128i order =
        _mm_setr_epi8(i, no, no, no, i + 4, no, no, no, i + 8, no, no, no, i + 12, no, no, no);
    const __m512i codes = _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(order));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes), numbers.scale, numbers.offset);
  }

  // Stores two inputs side by side for each output. Numbers half-way between two of bfloat16 are
  // rounded away from zero.
  TW_ALWAYS_INLINE static void store_line(__m512 first, __m512 second, uint16_t *to) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i upper =
        _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 0, 0, 6, 7, 0, 0, 10, 11, 0, 0, 14, 15, 0, 0));
    const __m512i low = _mm512_add_epi32(_mm512_castps_si512(first), half);
    const __m512i high = _mm512_add_epi32(_mm512_castps_si512(second), half);
    constexpr __mmask64 kLowerHalves = 0x3333333333333333;
    _mm512_store_si512(to, _mm512_mask_shuffle_epi8(high, kLowerHalves, low, upper));
  }

  Codes codes_;
};

constexpr int64_t kMostSteps = 8;  // of a part: two decoded parts share the L1 cache

// Weights of a part, decoded to bfloat16 while the previous part is multiplied: the vector units are
// idle then.
template <typename Decoder>
class Weights {
 public:
  Weights(const Decoder &decoder, int64_t blocks, const Part &first)
      : decoder_(decoder), blocks_(blocks) {
    decoder_.begin(first.panel);
    plan(first, 1);
    prepare(0);
  }

  const uint16_t *take(const Part &part, const Part &next) {
    const uint16_t *tiles = to_;
    turn_ = 1 - turn_;
    // All is decoded before the last step loads its first operands.
    plan(next, larger(blocks_ * part.steps - 1, 1));
    return tiles;
  }

  // Returns where the next part will be, once it is decoded.
  const uint16_t *upcoming() const { return to_; }

  // Decodes share number `share` of the next part.
  void prepare(int64_t share) {
    int64_t end = smaller((share + 1) * share_, pieces_);
    for (int64_t piece = share * share_; piece < end; piece++)
      decoder_.decode(part_.panel, part_.step + piece / Decoder::kPieces, piece % Decoder::kPieces,
                      to_ + piece / Decoder::kPieces * kStep);
  }

 private:
  void plan(const Part &part, int64_t shares) {
    // After the last part nothing is left to decode.
    if (part.steps && part.panel != panel_) decoder_.prepare(panel_ = part.panel);
    part_ = part;
    to_ = decoded[turn_];
    pieces_ = part.steps * Decoder::kPieces;
    share_ = divide_up(pieces_, shares);
  }

  alignas(64) static thread_local uint16_t decoded[2][kMostSteps * kStep];

  const Decoder decoder_;
  int64_t blocks_;
  int turn_ = 0;
  int64_t panel_ = -1;      // that is prepared
  Part part_{};             // to decode
  uint16_t *to_ = nullptr;  // its destination
  int64_t pieces_ = 0, share_ = 0;  // pieces of the part, and of each share of it
};

template <typename Decoder>
alignas(64) thread_local uint16_t Weights<Decoder>::decoded[2][kMostSteps * kStep];

// Multiplies up to 32 rows. A panel's sums stay in their tiles to the end.
template <bool kTwoRowTiles, typename Decoder>
void multiply_block(const tw_linear &a, const Share &share, const Order &order, float *products) {
  int64_t depth = a.inputs / kTileInner, count = share.end - share.start;
  const auto *tiles = static_cast<const uint16_t *>(a.rows) + share.start * a.inputs;
  Finished finished{};
  Part part{0, share.first, 0, order.part};
  Weights<Decoder> weights(Decoder(a), 1, part);
  configure_tiles(count);
  while (part.sweep < depth) {
    Part next = after(part, share, order, depth);
    const uint16_t *panel = weights.take(part, next);
    int64_t rows_a_step = divide_up(kPair, part.steps);
    float *sums = products + part.panel % 2 * kPair * kPair;
    bool last = part.step + part.steps == depth;
    if (part.step == 0) zero_products();
    multiply_tiles<kTwoRowTiles>(tiles + part.step * kStep, panel, part.steps, [&](int64_t step) {
      weights.prepare(step);
      int64_t from = step * rows_a_step, to = from + rows_a_step;
      if (last)
        prefetch_out(a, share.start + from, share.start + smaller(to, count), part.panel);
      finish_rows(a, finished, from, to);
    });
    if (last) store_products(sums);
    finished = {sums, share.start, last ? count : 0, part.panel};
    part = next;
  }
  finish_rows(a, finished, 0, kPair);
}

// Multiplies many rows part after part, as with bfloat16 weights (amx_linear.cpp): one part is
// decoded while the previous one is multiplied.
template <typename Decoder>
void multiply(const tw_linear &a, const Share &share, const Order &order, float *products) {
  int64_t depth = a.inputs / kTileInner, blocks = divide_up(share.end - share.start, kPair);
  const auto *rows = static_cast<const uint16_t *>(a.rows) + share.start * a.inputs;
  alignas(64) float whole[2][kPair * kPair];  // complete sums, to be finished
  Finished finished{};
  Part part{0, share.first, 0, smaller(order.part, order.sweep)};
  Weights<Decoder> weights(Decoder(a), blocks, part);
  configure_tiles(kPair);
  bool begins = true;
  while (part.sweep < depth) {
    Part next = after(part, share, order, depth);
    const uint16_t *panel = weights.take(part, next);
    auto operands = [&](int64_t block) {
      return Operands{rows + (block * depth + part.step) * kStep, panel};
    };
    if (begins) load_operands(operands(0));
    begins = false;
    const Operands ahead =
        next.steps ? Operands{rows + next.step * kStep, weights.upcoming()} : operands(0);
    // Finish the previous block late: reading a tile right after its store is slow.
    int64_t wait = part.steps / 2, rows_a_step = divide_up(kPair, part.steps - wait);
    bool last = part.step + part.steps == depth;
    for (int64_t block = 0; block < blocks; block++) {
      int64_t row = share.start + block * kPair, count = smaller(share.end - row, kPair);
      int64_t slot = order.sweeps ? (part.panel - share.first) * blocks + block : block;
      float *sums = products + slot * kPair * kPair;
      if (part.step)
        load_products(sums);
      else
        zero_products();
      if (last) sums = whole[block % 2];
      multiply_chained(operands(block), part.steps, block + 1 < blocks ? operands(block + 1) : ahead,
                       [&](int64_t step) {
                         weights.prepare(block * part.steps + step);
                         if (step >= wait)
                           finish_rows(a, finished, (step - wait) * rows_a_step,
                                       (step - wait + 1) * rows_a_step);
                       });
      store_products(sums);
      finished = {sums, row, last ? count : 0, part.panel};
    }
    part = next;
  }
  finish_rows(a, finished, 0, kPair);
}

template <typename Decoder>
void multiply(const tw_linear &a) {
  const Limits limits{kMostSteps, kMostElements, kMostPanels, 512};
  distribute(a, limits, [&](const Share &share, const Order &order, float *sums) {
    int64_t count = share.end - share.start;
    if (count <= kTileRows)
      multiply_block<false, Decoder>(a, share, order, sums);
    else if (count <= kPair)
      multiply_block<true, Decoder>(a, share, order, sums);
    else
      multiply<Decoder>(a, share, order, sums);
    _tile_release();
  });
}

// Up to so many rows are multiplied faster as bytes than by tiles.
constexpr int64_t kFewRows = 8;

// Rounds rows as the product of bytes does, so that the two differ by bfloat16's rounding alone.
void multiply_groups(tw_linear a) {
  if (a.num_rows <= kFewRows) return avx512_groups_linear(&a);
  a.rows = round_tiles(a);
  const int coding = coding_of(*a.groups);
  if (coding == kValues) return multiply<GroupedDecoder<kValues>>(a);
  if (coding == 4) return multiply<GroupedDecoder<4>>(a);
  coding == 6 ? multiply<GroupedDecoder<6>>(a) : multiply<GroupedDecoder<8>>(a);
}

}  // namespace

void amx_linear_decoded(const tw_linear &a) {
  a.format == TW_INT8 ? multiply<Int8Decoder>(a) : multiply_groups(a);
}
