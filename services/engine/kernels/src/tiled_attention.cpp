// Attention over the paged cache, one kernel for decodes and prompt chunks. Compiled once for each
// instruction set with tiled kernels; TW_ATTEND is the name of the function that this compilation
// defines.
//
// Query heads that share a key head become rows of one matrix (row = query * group + head), up to
// 32 at a time, as many as a 2 x 2 block of tiles holds. Cached blocks are in tiles already, so
// keys and values need no conversion.
#include <string.h>

#include "attention_span.h"
#include "attention_units.h"
#include "kernels.h"
#include "powers.h"
#include "threads.h"
#include "tiled.h"
#include "tiles.h"

namespace {

constexpr int64_t kMostRows = kPair;  // of a unit
constexpr int64_t kChunkScores = 64;  // keys of a chunk scored together
constexpr int64_t kMostHeadDim = 512;
constexpr int64_t kMostDecodeUnits = 16;  // maximum units of decodes in a loop's item
constexpr int64_t kMostChunkUnits = 4;  // maximum units of chunks in a loop's item
constexpr int64_t kShares = 4;     // minimum items per thread
constexpr int64_t kTokens = 8;    // tokens written by a loop's item
constexpr float kLowest = -1e30f;  // finite, so that a difference of two is not NaN
// Sum of weights above which their base is raised; high, so that this is rare.
constexpr float kMostWeight = 1 << 30;
constexpr int64_t kLanes = 16;
// Rows of scores and weights end with an unused cache line, so that neighbouring rows map to
// different cache sets.
constexpr int64_t kScoreStride = kMostKeys + 16;
constexpr int64_t kWeightStride = kMostKeys + 32;

struct alignas(64) Scratch {
  float scores[kMostRows * kScoreStride];
  float state[kMostRows * kMostHeadDim];  // weighted values, not yet divided
  uint16_t queries[kMostRows * kMostHeadDim];
  uint16_t weights[kMostRows * kWeightStride];
  uint16_t tail[kTileInner * kMostHeadDim];
  int64_t tokens[kMostRows];          // query token of each row
  int64_t heads[kMostRows];           // query head of each row
  float base[kMostRows];              // scores become weights as 2^(score - base)
  float totals[kMostRows * kLanes];   // sum of the weights in each lane
  float addends[kMostRows * kLanes];  // summands of the keys scored last
};

class Attention {
 public:
  explicit Attention(const tw_attention &a)
      : a_(a),
        key_size_(a.block_size * a.head_dim),
        value_size_(a.block_size * a.value_dim) {
    while (decodes_ < a.sequences && is_decode(a, decodes_)) decodes_++;
    // Fewer queries than tokens: a prompt's last token may look like a decode, yet its prompt's
    // keys must be written too.
    if (a.query_starts[a.sequences] == a.tokens) written_ = decodes_;
  }

  // Number of leading sequences that decode.
  int64_t decodes() const { return decodes_; }

  // Writes one token's keys and values into tiles. If 32 tokens of a prompt fill whole tiles, the
  // first writes them all; attend() writes what only one unit reads.
  void write(int64_t token) const {
    if (token < written_ && is_private(token)) return;
    int64_t first = token - a_.slots[token] % kTileInner;
    bool together = first >= 0 && first + kTileInner <= a_.tokens &&
                    a_.slots[first] % kTileInner == 0 &&
                    a_.slots[first + kTileInner - 1] == a_.slots[first] + kTileInner - 1;
    if (together && token != first) return;
    for (int64_t h = 0; h < a_.num_kv_heads; h++) write(token, h, together);
  }

  // next: the thread's next unit, for which decodes prefetch, or null.
  void attend(const Unit &unit, const Unit *next, Scratch &s) const {
    bool writes = unit.sequence < written_ && unit.last_key == a_.context_lengths[unit.sequence] &&
                  is_private(unit.sequence);
    load_queries(unit, s);
    bool decodes = is_decode(a_, unit.sequence);
    int64_t most = decodes ? kDecodeKeys : kChunkKeys;
    int64_t steps = (decodes ? kDecodeKeys : kChunkScores) / kTileInner;
    Span span = span_at(unit, unit.first_key, most);
    for (;;) {
      int64_t end = span.first + span.count;
      Span following;
      if (end < unit.last_key)
        following = span_at(unit, end, most);
      else if (decodes && next)
        following = span_at(*next, next->first_key, most);
      // Writing here fetches the cache lines only once. If a group has several units, each writes
      // the same data before it reads.
      if (writes && end == unit.last_key) write(unit.sequence, unit.kv_head, false);
      // Chunks need no prefetch: their keys and values are in the L2 cache.
      Prefetch prefetch(following, decodes ? a_.head_dim : 0, decodes ? a_.value_dim : 0,
                        unit.num_rows + span.num_steps * (1 + a_.value_dim / kPair));
      for (int64_t step = 0; step < span.num_steps; step += steps) {
        Scored scored{span.first + step * kTileInner, step, smaller(step + steps, span.num_steps)};
        score(unit, span, scored, prefetch, s);
        if (a_.cap) cap_scores(unit.num_rows, scored.width(), s);
        if (a_.slopes) lower_by_distance(unit, scored, s);
        weigh(unit, scored, prefetch, s);
      }
      gather(unit, span, prefetch, s);
      if (end == unit.last_key) break;
      span = following;
    }
    if (unit.partial)
      keep(unit, s);
    else
      for (int64_t r = 0; r < unit.num_rows; r++)
        store(s.tokens[r], s.heads[r], s.state + r * a_.value_dim, s.base[r], total(r, s));
  }

  // Merges the parts of a unit. unit.partial: the first part's state.
  void merge(const Unit &unit, int64_t parts, int64_t part_size) const {
    alignas(64) float sum[kMostHeadDim];
    for (int64_t r = 0; r < unit.num_rows; r++) {
      const float *first = unit.partial + r * (a_.value_dim + 2);
      float highest = kLowest, total = 0;
      for (int64_t p = 0; p < parts; p++) {
        float candidate = first[p * part_size + a_.value_dim];
        highest = candidate > highest ? candidate : highest;
      }
      memset(sum, 0, sizeof sum);
      for (int64_t p = 0; p < parts; p++) {
        const float *part = first + p * part_size;
        float power = power_of_two(part[a_.value_dim] - highest);
        __m512 factor = _mm512_set1_ps(power);
        total += part[a_.value_dim + 1] * power;
        for (int64_t i = 0; i < a_.value_dim; i += 16)
          _mm512_store_ps(sum + i, _mm512_fmadd_ps(factor, _mm512_loadu_ps(part + i),
                                                   _mm512_load_ps(sum + i)));
      }
      int64_t row = unit.first_row + r;
      store(a_.query_starts[unit.sequence] + row / a_.group,
            unit.kv_head * a_.group + row % a_.group, sum, highest, total);
    }
  }

 private:
  // Returns whether no other sequence reads what a decode writes in this step. Once the block is
  // full, the scheduler may have shared it.
  bool is_private(int64_t token) const {
    return a_.slots[token] % a_.block_size != a_.block_size - 1;
  }

  // Writes one head of a token, or of the 32 tokens from it on.
  void write(int64_t token, int64_t head, bool together) const {
    int64_t from = token * a_.row_stride, slot = a_.slots[token];
    auto key = static_cast<const uint16_t *>(a_.keys) + from + head * a_.head_dim;
    auto value = static_cast<const uint16_t *>(a_.values) + from + head * a_.value_dim;
    int64_t block = slot / a_.block_size * a_.num_kv_heads + head;
    int64_t first = slot % a_.block_size / kTileInner * kTileInner;
    auto keys = static_cast<uint16_t *>(a_.key_cache) + block * key_size_ + first * a_.head_dim;
    auto values =
        static_cast<uint16_t *>(a_.value_cache) + block * value_size_ + first * a_.value_dim;
    if (together)
      write_all(key, value, keys, values);
    else
      write_one(slot % kTileInner, key, value, keys, values);
  }

  // Writes the token at `offset` in a group of 32.
  void write_one(int64_t offset, const uint16_t *key, const uint16_t *value, uint16_t *keys,
                 uint16_t *values) const {
    auto from = reinterpret_cast<const uint32_t *>(key);
    auto to = reinterpret_cast<uint32_t *>(keys + offset / kTileRows * kTileRows * a_.head_dim) +
              offset % kTileRows;
    for (int64_t pair = 0; pair < a_.head_dim / 2; pair++) to[pair * kTileRows] = from[pair];
    values += pair_row(offset / 2) * kPair + offset % 2;
    for (int64_t i = 0; i < a_.value_dim; i++)
      values[i / kTileRows * kTile + i % kTileRows * 2] = value[i];
  }

  // Writes 32 tokens.
  void write_all(const uint16_t *key, const uint16_t *value, uint16_t *keys,
                 uint16_t *values) const {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i rows =
        _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int>(a_.row_stride * 2)));
    for (int64_t half = 0; half < 2; half++, key += kTileRows * a_.row_stride)
      for (int64_t i = 0; i < a_.head_dim; i += 2, keys += kPair)
        _mm512_store_si512(keys, _mm512_i32gather_epi32(rows, key + i, 1));
    // Interleave two tokens' values: indices 0, 32, 1, 33, ...
    const __m512i low = _mm512_or_si512(
        lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(kTileInner)), 16));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(kTileRows));
    for (int64_t pair = 0; pair < kTileRows; pair++, value += 2 * a_.row_stride)
      for (int64_t i = 0; i < a_.value_dim; i += kTileInner) {
        __m512i even = _mm512_loadu_si512(value + i);
        __m512i odd = _mm512_loadu_si512(value + a_.row_stride + i);
        uint16_t *to = values + i / kTileRows * kTile + pair_row(pair) * kPair;
        _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_store_si512(to + kTile, _mm512_permutex2var_epi16(even, high, odd));
      }
  }

  // Returns the unit's keys from `first` on, at most `most`.
  Span span_at(const Unit &unit, int64_t first, int64_t most) const {
    Span span;
    span.first = first;
    span.count = smaller(most, unit.last_key - first);
    const int32_t *blocks = a_.block_tables + unit.sequence * a_.table_stride;
    int64_t block = first / a_.block_size, offset = first % a_.block_size;
    for (int64_t key = 0; key < span.count; key += kTileInner) {
      int64_t head = blocks[block] * a_.num_kv_heads + unit.kv_head;
      int64_t key_at = head * key_size_ + offset * a_.head_dim;
      int64_t value_at = head * value_size_ + offset * a_.value_dim;
      span.keys[span.num_steps] = static_cast<const uint16_t *>(a_.key_cache) + key_at;
      span.values[span.num_steps++] = static_cast<const uint16_t *>(a_.value_cache) + value_at;
      offset += kTileInner;
      if (offset == a_.block_size) {
        offset = 0;
        block++;
      }
    }
    return span;
  }

  // Returns the position of row r's own key.
  int64_t position(const Unit &unit, int64_t r, const Scratch &s) const {
    return a_.context_lengths[unit.sequence] - a_.query_starts[unit.sequence + 1] + s.tokens[r];
  }

  // Returns the index after the last key that row r sees.
  int64_t end_of(const Unit &unit, int64_t r, const Scratch &s) const {
    return a_.ends ? a_.ends[s.tokens[r]] : position(unit, r, s) + 1;
  }

  // Copies the unit's queries into rows and resets the sums.
  void load_queries(const Unit &unit, Scratch &s) const {
    int64_t token = a_.query_starts[unit.sequence] + unit.first_row / a_.group;
    int64_t member = unit.first_row % a_.group;
    for (int64_t r = 0; r < unit.num_rows; r++) {
      s.tokens[r] = token;
      s.heads[r] = unit.kv_head * a_.group + member;
      s.base[r] = kLowest;
      _mm512_store_ps(s.totals + r * kLanes, _mm512_setzero_ps());
      const uint16_t *from = static_cast<const uint16_t *>(a_.queries) + token * a_.row_stride +
                             s.heads[r] * a_.head_dim;
      for (int64_t i = 0; i < a_.head_dim; i += kTileInner)
        _mm512_store_si512(s.queries + r * a_.head_dim + i, _mm512_loadu_si512(from + i));
      if (++member == a_.group) {
        member = 0;
        token++;
      }
    }
  }

  // scores [rows, keys] = queries @ keys.T
  void score(const Unit &unit, const Span &span, const Scored &scored, Prefetch &prefetch,
             Scratch &s) const {
    float *scores = s.scores;
    for (int64_t step = scored.step; step < scored.end; step++, scores += kTileInner) {
      prefetch.advance();
      const uint16_t *keys = span.keys[step];
      multiply_block(unit.num_rows, nullptr, scores, kScoreStride, a_.head_dim / kTileInner,
                     [&](int64_t at) {
                       const uint16_t *tile = keys + at * kTile;
                       return Factors{s.queries + at * kTileInner, a_.head_dim, tile,
                                      tile + kTileRows * a_.head_dim};
                     });
    }
  }

  // Applies the soft cap to unscaled scores: cap * tanh(scores / cap), with cap divided by the
  // scale.
  void cap_scores(int64_t num_rows, int64_t width, Scratch &s) const {
    float cap = a_.cap / a_.scale;
    const __m512 shrink = _mm512_set1_ps(1.0f / cap), grow = _mm512_set1_ps(cap);
    for (int64_t r = 0; r < num_rows; r++)
      for (float *at = s.scores + r * kScoreStride, *end = at + width; at < end; at += kLanes)
        _mm512_store_ps(at, _mm512_mul_ps(grow, tanh(_mm512_mul_ps(shrink, _mm512_load_ps(at)))));
  }

  // Adds the bias of each key's distance to unscaled scores.
  void lower_by_distance(const Unit &unit, const Scored &scored, Scratch &s) const {
    const __m512 lane =
        _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t r = 0; r < unit.num_rows; r++) {
      const __m512 slope = _mm512_set1_ps(a_.slopes[s.heads[r]] / a_.scale);
      float *scores = s.scores + r * kScoreStride;
      const int64_t first = scored.first - position(unit, r, s);
      for (int64_t i = 0; i < scored.width(); i += kLanes) {
        const __m512 distance = _mm512_add_ps(lane, _mm512_set1_ps(static_cast<float>(first + i)));
        _mm512_store_ps(scores + i,
                        _mm512_fmadd_ps(slope, distance, _mm512_load_ps(scores + i)));
      }
    }
  }

  // Turns scores into weights by an online softmax (https://arxiv.org/abs/1805.02867). Any base
  // that keeps the weights in range will do: a row's first scores set it, and only far higher ones
  // raise it.
  void weigh(const Unit &unit, const Scored &scored, Prefetch &prefetch, Scratch &s) const {
    int64_t width = scored.width(), end = scored.first + width;
    int64_t highest = position(unit, unit.num_rows - 1, s);
    bool all = end <= smaller(end_of(unit, 0, s), unit.last_key) &&
               (!a_.window || scored.first >= highest + 1 - a_.window);
    if (all && weigh_all(unit.num_rows, scored, prefetch, s)) return;
    for (int64_t r = 0; r < unit.num_rows; r++) {
      prefetch.advance();
      int64_t oldest = position(unit, r, s) + 1 - a_.window;
      int64_t first = a_.window ? larger(oldest - scored.first, 0) : 0;
      int64_t last = smaller(end_of(unit, r, s), unit.last_key) - scored.first;
      Visible visible{static_cast<int>(first), static_cast<int>(last)};
      if (s.base[r] == kLowest) raise_base(r, visible, scored, s);
      if (weigh_visible(r, visible, false, scored, s)) continue;
      raise_base(r, visible, scored, s);
      weigh_visible(r, visible, true, scored, s);
    }
  }

  // Returns the factor that scales scores and converts them to base 2.
  float scale() const { return a_.scale * kLog2E; }

  // Turns exponents(i), in units for keys i to i + 15, into a row's weights and returns their sum.
  template <typename Exponents>
  static __m512 weigh_row(int64_t r, const Scored &scored, const Exponents &exponents, Scratch &s) {
    uint16_t *weights = s.weights + r * kWeightStride + scored.step * kTileInner;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < scored.width(); i += 2 * kLanes) {
      __m512i weight = powers(exponents(i), exponents(i + kLanes));
      sum = add_pairs(sum, weight);
      _mm512_store_si512(weights + i, weight);
    }
    return sum;
  }

  // Weighs keys that all rows see. Returns false if weights are out of range.
  bool weigh_all(int64_t num_rows, const Scored &scored, Prefetch &prefetch, Scratch &s) const {
    const __m512 scale = _mm512_set1_ps(this->scale() * kUnits);
    __mmask16 beyond = 0;
    for (int64_t r = 0; r < num_rows; r++) {
      prefetch.advance();
      const float *scores = s.scores + r * kScoreStride;
      if (s.base[r] == kLowest) {
        __m512 first = _mm512_max_ps(_mm512_load_ps(scores), _mm512_load_ps(scores + kLanes));
        s.base[r] = _mm512_reduce_max_ps(first) * this->scale();
      }
      const __m512 base = _mm512_set1_ps((kOne - s.base[r]) * kUnits);
      auto exponents = [&](int64_t i) {
        return _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_load_ps(scores + i), scale, base));
      };
      __m512 sum = weigh_row(r, scored, exponents, s);
      _mm512_store_ps(s.addends + r * kLanes, sum);
      beyond |= out_of_range(sum);
    }
    if (beyond) return false;
    for (int64_t r = 0; r < num_rows; r++)
      add_to_total(r, _mm512_load_ps(s.addends + r * kLanes), s);
    return true;
  }

  // Weighs the keys that one row sees. Returns false if weights are out of range, unless `final`.
  bool weigh_visible(int64_t r, const Visible &visible, bool final, const Scored &scored,
                     Scratch &s) const {
    const float *scores = s.scores + r * kScoreStride;
    const __m512 scale = _mm512_set1_ps(this->scale() * kUnits);
    const __m512 base = _mm512_set1_ps((kOne - s.base[r]) * kUnits);
    auto exponents = [&](int64_t i) {
      __m512 units = _mm512_fmadd_ps(_mm512_load_ps(scores + i), scale, base);
      return _mm512_maskz_cvtps_epi32(visible.lanes(i), units);
    };
    __m512 sum = weigh_row(r, scored, exponents, s);
    if (!final && out_of_range(sum)) return false;
    add_to_total(r, sum, s);
    return true;
  }

  // Returns the lanes in which a sum is too large or NaN.
  static __mmask16 out_of_range(__m512 sum) {
    return _mm512_cmp_ps_mask(sum, _mm512_set1_ps(kMostWeight), _CMP_NLE_UQ);
  }

  static void add_to_total(int64_t r, __m512 sum, Scratch &s) {
    float *totals = s.totals + r * kLanes;
    _mm512_store_ps(totals, _mm512_add_ps(sum, _mm512_load_ps(totals)));
  }

  // Makes the highest visible score the base and rescales earlier weights, sums and state.
  void raise_base(int64_t r, const Visible &visible, const Scored &scored, Scratch &s) const {
    const float *scores = s.scores + r * kScoreStride;
    __m512 highest = _mm512_set1_ps(kLowest);
    for (int64_t i = 0; i < scored.width(); i += kLanes)
      highest = _mm512_mask_max_ps(highest, visible.lanes(i), highest, _mm512_load_ps(scores + i));
    float found = _mm512_reduce_max_ps(highest), before = s.base[r];
    if (found == kLowest) return;
    s.base[r] = found * scale();
    if (before == kLowest) return;
    __m512 correction = _mm512_set1_ps(power_of_two(before - s.base[r]));
    float *totals = s.totals + r * kLanes, *state = s.state + r * a_.value_dim;
    _mm512_store_ps(totals, _mm512_mul_ps(correction, _mm512_load_ps(totals)));
    for (int64_t i = 0; i < a_.value_dim; i += kLanes)
      _mm512_store_ps(state + i, _mm512_mul_ps(correction, _mm512_load_ps(state + i)));
    uint16_t *weights = s.weights + r * kWeightStride;  // of this span, not yet multiplied
    for (int64_t i = 0; i < scored.step * kTileInner; i += kLanes) {
      auto at = reinterpret_cast<__m256i *>(weights + i);
      __m512 weight = to_float(_mm256_load_si256(at));
      _mm256_store_si256(at, to_bfloat16(_mm512_mul_ps(correction, weight)));
    }
  }

  static float total(int64_t r, const Scratch &s) {
    return _mm512_reduce_add_ps(_mm512_load_ps(s.totals + r * kLanes));
  }

  // state [rows, value_dim] += weights @ values
  void gather(const Unit &unit, Span &span, Prefetch &prefetch, Scratch &s) const {
    bool first = span.first == unit.first_key;
    // Slots past the context hold an earlier sequence's data. Its weight is zero, but zero times
    // NaN is NaN.
    if (int64_t left = span.count % kTileInner) {
      const uint16_t *&tail = span.values[span.num_steps - 1];
      tail = clean(tail, left, a_.value_dim, s.tail);
    }
    for (int64_t i = 0; i < a_.value_dim; i += kPair) {
      float *state = s.state + i;
      multiply_block(unit.num_rows, first ? nullptr : state, state, a_.value_dim, span.num_steps,
                     [&](int64_t step) {
                       prefetch.advance();
                       const uint16_t *tile = span.values[step] + i * kTileInner;
                       return Factors{s.weights + step * kTileInner, kWeightStride, tile,
                                      tile + kTile};
                     });
    }
  }

  void keep(const Unit &unit, const Scratch &s) const {
    for (int64_t r = 0; r < unit.num_rows; r++) {
      float *partial = unit.partial + r * (a_.value_dim + 2);
      memcpy(partial, s.state + r * a_.value_dim, static_cast<size_t>(a_.value_dim) * 4);
      partial[a_.value_dim] = s.base[r];
      partial[a_.value_dim + 1] = total(r, s);
    }
  }

  void store(int64_t token, int64_t head, const float *state, float base, float total) const {
    int64_t width = a_.num_kv_heads * a_.group * a_.value_dim;
    auto out = static_cast<uint16_t *>(a_.out) + tiled(token, head * a_.value_dim, width);
    if (a_.sinks) total += power_of_two(a_.sinks[head] * kLog2E - base);
    // A row that sees no key has no values to divide: its output is zero.
    __m512 scale = _mm512_set1_ps(total == 0 ? 0.0f : 1.0f / total);
    for (int64_t i = 0; i < a_.value_dim; i += kTileInner, out += kPair * kTileInner) {
      __m512 low = _mm512_mul_ps(scale, _mm512_loadu_ps(state + i));
      __m512 high = _mm512_mul_ps(scale, _mm512_loadu_ps(state + i + kLanes));
      _mm512_store_si512(out, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    }
  }

  const tw_attention &a_;
  int64_t key_size_, value_size_;  // elements of a head in a block
  int64_t decodes_ = 0;  // sequences before the first chunk
  int64_t written_ = 0;  // leading sequences, of one token each, whose keys attend() may write
};

}  // namespace

void TW_ATTEND(const tw_attention *attention) {
  const tw_attention &a = *attention;
  Attention kernel(a);
  int64_t part_size = smaller(kMostRows, a.group) * (a.value_dim + 2);
  const Plan work = plan(a, kernel.decodes(), part_size, kMostRows, kTileInner);
  parallel_for(divide_up(a.tokens, kTokens), [&](int64_t item) {
    int64_t end = smaller((item + 1) * kTokens, a.tokens);
    for (int64_t token = item * kTokens; token < end; token++) kernel.write(token);
  });
  // An item has several units, so that a thread knows its next one.
  auto share = [](int64_t units, int64_t most) {
    return smaller(larger(units / (kShares * num_threads()), 1), most);
  };
  int64_t num_chunks = work.num_units - work.num_decodes;
  int64_t decode_units = share(work.num_decodes, kMostDecodeUnits);
  int64_t chunk_units = share(num_chunks, kMostChunkUnits);
  int64_t groups = divide_up(work.num_decodes, decode_units);
  parallel_for(groups + divide_up(num_chunks, chunk_units), [&](int64_t item) {
    bool decodes = item < groups;
    int64_t first = decodes ? item * decode_units
                            : work.num_decodes + (item - groups) * chunk_units;
    int64_t last = decodes ? smaller(first + decode_units, work.num_decodes)
                           : smaller(first + chunk_units, work.num_units);
    Scratch scratch;
    int64_t configured = 0;
    for (int64_t i = first; i < last; i++) {
      int64_t rows = work.units[i].num_rows;
      if (rows != configured) configure_tiles(configured = rows);
      kernel.attend(work.units[i], i + 1 < last ? work.units + i + 1 : nullptr, scratch);
    }
    release_tiles();
  });
  if (work.is_cut)
    parallel_for(work.num_units, [&](int64_t i) {
      if (work.units[i].parts > 1) kernel.merge(work.units[i], work.units[i].parts, part_size);
    });
}
