// Attention over the paged cache on AMX, one kernel for decodes and prompt chunks.
//
// The query heads that share a key head become rows of one matrix (row = query * group + head), up
// to 32 of them at a time, which is what a 2 x 2 block of tiles holds. Cached blocks are already in
// tiles, so keys and values go from memory to tile registers untouched.
#include <string.h>

#include "amx.h"
#include "buffer.h"
#include "kernels.h"
#include "threads.h"

namespace {

constexpr int64_t kMostRows = kPair;  // of a unit
// Keys per update of the online softmax. Decodes read them from memory, the more in a row the
// better; chunks multiply, and what they work on should stay near the L1 cache.
constexpr int64_t kMostKeys = 256;
constexpr int64_t kChunkKeys = 128;
constexpr int64_t kMostHeadDim = 256;
// A context is cut into parts of this many tokens, whatever the number of threads, so that a result
// does not depend on the machine or on what else is in the batch. Only decodes are cut: a prompt
// chunk has rows enough to share.
constexpr int64_t kPart = 512;
constexpr int64_t kTogether = 16;  // decodes' units in one item of a loop, at most
constexpr int64_t kShares = 4;     // of a thread, at least
constexpr int64_t kTokens = 8;    // written by one item of a loop
constexpr float kLowest = -1e30f;  // finite: a difference of two is no NaN
// Weights may add up to this before their base is raised, which is seldom then.
constexpr float kMostWeight = 1 << 30;
constexpr int64_t kLanes = 16;
// A row of scores, or of weights, ends with an unused cache line, so that neighbouring rows fall
// into different cache sets.
constexpr int64_t kScoreStride = kMostKeys + 16;
constexpr int64_t kWeightStride = kMostKeys + 32;

struct Unit {
  int64_t sequence;
  int64_t kv_head;
  int64_t first_row, num_rows;  // rows of the sequence's folded queries
  int64_t first_key, last_key;
  float *partial;  // where a part's state goes, or null when the unit is the whole
  int64_t parts;   // of the first part, how many there are; of the others 0
};

// Fetches keys and values a little at a time, while others are worked on. Blocks lie in pages of
// their own, within which the core fetches ahead by itself: so it goes along all of them at once.
class Fetch {
 public:
  void add(const uint16_t *block) { blocks_[num_blocks_++] = block; }

  // To be asked for `lines` of each block in so many calls of `some`.
  void begin(int64_t lines, int64_t calls) {
    left_ = num_blocks_ ? lines : 0;
    share_ = divide_up(left_, larger(calls, 1));
  }

  void some() {
    int64_t end = line_ + smaller(share_, left_);
    left_ -= end - line_;
    for (; line_ < end; line_++)
      for (int64_t b = 0; b < num_blocks_; b++)
        _mm_prefetch(reinterpret_cast<const char *>(blocks_[b] + line_ * kTileInner), _MM_HINT_T1);
  }

 private:
  const uint16_t *blocks_[2 * kMostKeys / kTileInner];
  int64_t num_blocks_ = 0;
  int64_t line_ = 0, left_ = 0, share_ = 0;
};

struct alignas(64) Scratch {
  float scores[kMostRows * kScoreStride];
  float state[kMostRows * kMostHeadDim];  // weighted values, not yet divided
  uint16_t queries[kMostRows * kMostHeadDim];
  uint16_t weights[kMostRows * kWeightStride];
  uint16_t tail[kTileInner * kMostHeadDim];
  float base[kMostRows];  // scores become weights as 2^(score - base)
  float totals[kMostRows * kLanes];  // of the weights, a sum for each lane
};

bool is_decode(const tw_attention &a, int64_t sequence) {
  return a.query_starts[sequence + 1] - a.query_starts[sequence] == 1;
}

class Attention {
 public:
  explicit Attention(const tw_attention &a) : a_(a), head_size_(a.block_size * a.head_dim) {
    while (decodes_ < a.sequences && is_decode(a, decodes_)) decodes_++;
  }

  // Sequences that decode and stand in front.
  int64_t decodes() const { return decodes_; }

  // Puts one token's keys and values where the tiles want them. Where 32 tokens of a prompt fill
  // whole tiles, the first of them does it for all; attend() writes what only one unit reads.
  void write(int64_t token) const {
    if (token < decodes_ && is_private(token)) return;
    int64_t first = token - a_.slots[token] % kTileInner;
    bool together = first >= 0 && first + kTileInner <= a_.tokens &&
                    a_.slots[first] % kTileInner == 0 &&
                    a_.slots[first + kTileInner - 1] == a_.slots[first] + kTileInner - 1;
    if (together && token != first) return;
    for (int64_t h = 0; h < a_.num_kv_heads; h++) write(token, h, together);
  }

  // `next` is the unit that the same thread goes on with, or null.
  void attend(const Unit &unit, const Unit *next, Scratch &s) const {
    // Written here, the cache lines are fetched once. Where a group has several units, each writes
    // the same before it reads.
    if (unit.sequence < decodes_ && unit.last_key == a_.context_lengths[unit.sequence] &&
        is_private(unit.sequence))
      write(unit.sequence, unit.kv_head, false);
    load_queries(unit, s);
    for (int64_t r = 0; r < unit.num_rows; r++) {
      s.base[r] = kLowest;
      _mm512_store_ps(s.totals + r * kLanes, _mm512_setzero_ps());
    }
    memset(s.state, 0, sizeof(float) * static_cast<size_t>(unit.num_rows * a_.head_dim));
    int64_t most = is_decode(a_, unit.sequence) ? kMostKeys : kChunkKeys;
    for (int64_t key = unit.first_key; key < unit.last_key; key += most) {
      int64_t count = smaller(most, unit.last_key - key);
      Fetch fetch;
      if (most == kMostKeys) plan_fetch(unit, next, key + most, count, fetch);
      score(unit, key, count, fetch, s);
      if (a_.cap) cap_scores(unit.num_rows, divide_up(count, kTileInner) * kTileInner, s);
      for (int64_t r = 0; r < unit.num_rows; r++) {
        weigh(unit, r, key, count, s);
        fetch.some();
      }
      gather(unit, key, count, fetch, s);
    }
    if (unit.partial)
      keep(unit, s);
    else
      for (int64_t r = 0; r < unit.num_rows; r++)
        store(unit, r, s.state + r * a_.head_dim, s.base[r], total(r, s));
  }

  // Joins the parts of one unit. `unit.partial` is the first part's.
  void merge(const Unit &unit, int64_t parts, int64_t part_size) const {
    alignas(64) float sum[kMostHeadDim];
    for (int64_t r = 0; r < unit.num_rows; r++) {
      const float *first = unit.partial + r * (a_.head_dim + 2);
      float highest = kLowest, total = 0;
      for (int64_t p = 0; p < parts; p++) {
        float candidate = first[p * part_size + a_.head_dim];
        highest = candidate > highest ? candidate : highest;
      }
      memset(sum, 0, sizeof sum);
      for (int64_t p = 0; p < parts; p++) {
        const float *part = first + p * part_size;
        float power = power_of_two(part[a_.head_dim] - highest);
        __m512 factor = _mm512_set1_ps(power);
        total += part[a_.head_dim + 1] * power;
        for (int64_t i = 0; i < a_.head_dim; i += 16)
          _mm512_store_ps(sum + i, _mm512_fmadd_ps(factor, _mm512_loadu_ps(part + i),
                                                   _mm512_load_ps(sum + i)));
      }
      store(unit, r, sum, highest, total);
    }
  }

 private:
  // Whether no other sequence reads what a decode adds in this step: once its block is full, the
  // scheduler may have given it to others too.
  bool is_private(int64_t token) const {
    return a_.slots[token] % a_.block_size != a_.block_size - 1;
  }

  // One head of a token, or of the 32 tokens from it on.
  void write(int64_t token, int64_t head, bool together) const {
    int64_t from = token * a_.row_stride + head * a_.head_dim, slot = a_.slots[token];
    auto key = static_cast<const uint16_t *>(a_.keys) + from;
    auto value = static_cast<const uint16_t *>(a_.values) + from;
    int64_t to = (slot / a_.block_size * a_.num_kv_heads + head) * head_size_ +
                 slot % a_.block_size / kTileInner * kTileInner * a_.head_dim;
    auto keys = static_cast<uint16_t *>(a_.key_cache) + to;
    auto values = static_cast<uint16_t *>(a_.value_cache) + to;
    if (together)
      write_all(key, value, keys, values);
    else
      write_one(slot % kTileInner, key, value, keys, values);
  }

  // Writes the token at `offset` of 32.
  void write_one(int64_t offset, const uint16_t *key, const uint16_t *value, uint16_t *keys,
                 uint16_t *values) const {
    auto from = reinterpret_cast<const uint32_t *>(key);
    auto to = reinterpret_cast<uint32_t *>(keys + offset / kTileRows * kTileRows * a_.head_dim) +
              offset % kTileRows;
    for (int64_t pair = 0; pair < a_.head_dim / 2; pair++) to[pair * kTileRows] = from[pair];
    values += offset / 2 * kPair + offset % 2;
    for (int64_t i = 0; i < a_.head_dim; i++)
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
    // Two tokens' values in turn: indices 0, 32, 1, 33, ...
    const __m512i low = _mm512_or_si512(
        lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(kTileInner)), 16));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(kTileRows));
    for (int64_t pair = 0; pair < kTileRows; pair++, value += 2 * a_.row_stride, values += kPair)
      for (int64_t i = 0; i < a_.head_dim; i += kTileInner) {
        __m512i even = _mm512_loadu_si512(value + i);
        __m512i odd = _mm512_loadu_si512(value + a_.row_stride + i);
        uint16_t *to = values + i / kTileRows * kTile;
        _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_store_si512(to + kTile, _mm512_permutex2var_epi16(even, high, odd));
      }
  }

  // The tiles of 32 tokens from `key` on, of one head.
  int64_t tiles_at(const Unit &unit, int64_t key) const {
    int64_t block = a_.block_tables[unit.sequence * a_.table_stride + key / a_.block_size];
    return (block * a_.num_kv_heads + unit.kv_head) * head_size_ +
           key % a_.block_size * a_.head_dim;
  }

  // What follows `count` keys: the unit's keys from `key` on, or the next unit's.
  void plan_fetch(const Unit &unit, const Unit *next, int64_t key, int64_t count,
                  Fetch &fetch) const {
    const Unit *from = key < unit.last_key ? &unit : next;
    if (!from) return;
    if (from == next) key = next->first_key;
    int64_t end = smaller(key + kMostKeys, from->last_key);
    for (; key < end; key += kTileInner) {
      int64_t at = tiles_at(*from, key);
      fetch.add(static_cast<const uint16_t *>(a_.key_cache) + at);
      fetch.add(static_cast<const uint16_t *>(a_.value_cache) + at);
    }
    int64_t steps = divide_up(count, kTileInner);
    fetch.begin(a_.head_dim, unit.num_rows + steps + steps * (a_.head_dim / kPair));
  }

  int64_t position(const Unit &unit, int64_t row) const {
    int64_t length = a_.query_starts[unit.sequence + 1] - a_.query_starts[unit.sequence];
    return a_.context_lengths[unit.sequence] - length + (unit.first_row + row) / a_.group;
  }

  void load_queries(const Unit &unit, Scratch &s) const {
    for (int64_t r = 0; r < unit.num_rows; r++) {
      int64_t row = unit.first_row + r;
      const uint16_t *from = static_cast<const uint16_t *>(a_.queries) +
                             (a_.query_starts[unit.sequence] + row / a_.group) * a_.row_stride +
                             (unit.kv_head * a_.group + row % a_.group) * a_.head_dim;
      memcpy(s.queries + r * a_.head_dim, from, static_cast<size_t>(a_.head_dim) * 2);
    }
  }

  // scores [rows, keys] = queries @ keys.T
  void score(const Unit &unit, int64_t key, int64_t count, Fetch &fetch, Scratch &s) const {
    bool two = unit.num_rows > kTileRows;
    for (int64_t k = 0; k < count; k += kTileInner) {
      fetch.some();
      const uint16_t *keys = static_cast<const uint16_t *>(a_.key_cache) + tiles_at(unit, key + k);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t i = 0; i < a_.head_dim; i += kTileInner) {
        _tile_loadd(6, keys + i * kTileRows, 64);
        _tile_loadd(7, keys + (a_.head_dim + i) * kTileRows, 64);
        _tile_loadd(4, s.queries + i, a_.head_dim * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
          _tile_loadd(5, s.queries + kTileRows * a_.head_dim + i, a_.head_dim * 2);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      float *scores = s.scores + k;
      _tile_stored(0, scores, kScoreStride * 4);
      _tile_stored(1, scores + kTileRows, kScoreStride * 4);
      if (two) {
        _tile_stored(2, scores + kTileRows * kScoreStride, kScoreStride * 4);
        _tile_stored(3, scores + kTileRows * kScoreStride + kTileRows, kScoreStride * 4);
      }
    }
  }

  // scores = cap * tanh(scores / cap), both before the scale.
  void cap_scores(int64_t num_rows, int64_t width, Scratch &s) const {
    float cap = a_.cap / a_.scale;
    const __m512 shrink = _mm512_set1_ps(1.0f / cap), grow = _mm512_set1_ps(cap);
    for (int64_t r = 0; r < num_rows; r++)
      for (float *at = s.scores + r * kScoreStride, *end = at + width; at < end; at += kLanes)
        _mm512_store_ps(at, _mm512_mul_ps(grow, tanh(_mm512_mul_ps(shrink, _mm512_load_ps(at)))));
  }

  // One row's online softmax step (https://arxiv.org/abs/1805.02867): scores to weights. Any base
  // will do that leaves the weights in range, so it is the first scores' highest until others
  // exceed that by far.
  void weigh(const Unit &unit, int64_t r, int64_t key, int64_t count, Scratch &s) const {
    int64_t at = position(unit, r), width = divide_up(count, kTileInner) * kTileInner;
    int64_t last = smaller(smaller(at + 1, unit.last_key) - key, count);
    int64_t first = a_.window ? larger(at + 1 - a_.window - key, 0) : 0;
    Visible visible{width, static_cast<int>(first), static_cast<int>(last)};
    if (s.base[r] == kLowest) raise_base(r, visible, s);
    bool all = first == 0 && last == width;
    if (all ? weigh_row<false>(r, visible, false, s) : weigh_row<true>(r, visible, false, s))
      return;
    raise_base(r, visible, s);
    weigh_row<true>(r, visible, true, s);
  }

  // Of `width` keys those that a row sees: first to last - 1.
  struct Visible {
    int64_t width;
    int first, last;

    __mmask16 lanes(int64_t i) const {
      const __m512i index = _mm512_add_epi32(
          _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
          _mm512_set1_epi32(static_cast<int>(i)));
      return _mm512_cmplt_epi32_mask(index, _mm512_set1_epi32(last)) &
             _mm512_cmpge_epi32_mask(index, _mm512_set1_epi32(first));
    }
  };

  // Scores in powers of two: one multiplication serves the scale and the change of base.
  float scale() const { return a_.scale * kLog2E; }

  // Stops short, with false, where the weights went out of range, unless the base is `final`.
  template <bool kMasked>
  bool weigh_row(int64_t r, const Visible &visible, bool final, Scratch &s) const {
    const float *scores = s.scores + r * kScoreStride;
    uint16_t *weights = s.weights + r * kWeightStride;
    const __m512 scale = _mm512_set1_ps(this->scale()), base = _mm512_set1_ps(s.base[r]);
    auto weigh = [&](int64_t i) {
      __m512 weight = rough_exp2(_mm512_fmsub_ps(_mm512_load_ps(scores + i), scale, base));
      return kMasked ? _mm512_maskz_mov_ps(visible.lanes(i), weight) : weight;
    };
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < visible.width; i += 2 * kLanes) {
      __m512 low = weigh(i), high = weigh(i + kLanes);
      sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
      _mm512_store_si512(weights + i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    }
    if (!final && _mm512_cmp_ps_mask(sum, _mm512_set1_ps(kMostWeight), _CMP_GT_OQ)) return false;
    float *totals = s.totals + r * kLanes;
    _mm512_store_ps(totals, _mm512_add_ps(sum, _mm512_load_ps(totals)));
    return true;
  }

  // Makes the highest visible score the base, and what was summed before relative to it.
  void raise_base(int64_t r, const Visible &visible, Scratch &s) const {
    const float *scores = s.scores + r * kScoreStride;
    __m512 highest = _mm512_set1_ps(kLowest);
    for (int64_t i = 0; i < visible.width; i += kLanes)
      highest = _mm512_mask_max_ps(highest, visible.lanes(i), highest, _mm512_load_ps(scores + i));
    float found = _mm512_reduce_max_ps(highest), before = s.base[r];
    if (found == kLowest) return;
    s.base[r] = found * scale();
    if (before == kLowest) return;
    __m512 correction = _mm512_set1_ps(power_of_two(before - s.base[r]));
    float *totals = s.totals + r * kLanes, *state = s.state + r * a_.head_dim;
    _mm512_store_ps(totals, _mm512_mul_ps(correction, _mm512_load_ps(totals)));
    for (int64_t i = 0; i < a_.head_dim; i += kLanes)
      _mm512_store_ps(state + i, _mm512_mul_ps(correction, _mm512_load_ps(state + i)));
  }

  static float total(int64_t r, const Scratch &s) {
    return _mm512_reduce_add_ps(_mm512_load_ps(s.totals + r * kLanes));
  }

  // state [rows, head_dim] += weights @ values
  void gather(const Unit &unit, int64_t key, int64_t count, Fetch &fetch, Scratch &s) const {
    bool two = unit.num_rows > kTileRows;
    const uint16_t *tiles[kMostKeys / kTileInner];
    for (int64_t k = 0; k < count; k += kTileInner) {
      tiles[k / kTileInner] = static_cast<const uint16_t *>(a_.value_cache) + tiles_at(unit, key + k);
      // Behind the context lies what an earlier sequence left. Its weight is zero, but zero times
      // a NaN is not.
      if (count - k < kTileInner)
        tiles[k / kTileInner] = clean(tiles[k / kTileInner], count - k, s.tail);
    }
    int64_t stride = a_.head_dim * 4;
    for (int64_t i = 0; i < a_.head_dim; i += kPair) {
      float *state = s.state + i, *lower = state + kTileRows * a_.head_dim;
      _tile_loadd(0, state, stride);
      _tile_loadd(1, state + kTileRows, stride);
      if (two) {
        _tile_loadd(2, lower, stride);
        _tile_loadd(3, lower + kTileRows, stride);
      }
      for (int64_t k = 0; k < count; k += kTileInner) {
        fetch.some();
        const uint16_t *values = tiles[k / kTileInner] + i * kTileInner;
        _tile_loadd(6, values, 64);
        _tile_loadd(7, values + kTile, 64);
        _tile_loadd(4, s.weights + k, kWeightStride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
          _tile_loadd(5, s.weights + kTileRows * kWeightStride + k, kWeightStride * 2);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, state, stride);
      _tile_stored(1, state + kTileRows, stride);
      if (two) {
        _tile_stored(2, lower, stride);
        _tile_stored(3, lower + kTileRows, stride);
      }
    }
  }

  // A copy of 32 tokens' value tiles in which those from `count` on are zero.
  const uint16_t *clean(const uint16_t *from, int64_t count, uint16_t *to) const {
    for (int64_t tile = 0; tile < a_.head_dim / kTileRows; tile++)
      for (int64_t pair = 0; pair < kTileRows; pair++) {
        int64_t left = count - 2 * pair;  // tokens of a pair alternate
        __mmask32 kept = left >= 2 ? 0xffffffff : left == 1 ? 0x55555555 : 0;
        int64_t at = tile * kTile + pair * kPair;
        _mm512_store_si512(to + at, _mm512_maskz_loadu_epi16(kept, from + at));
      }
    return to;
  }

  void keep(const Unit &unit, const Scratch &s) const {
    for (int64_t r = 0; r < unit.num_rows; r++) {
      float *partial = unit.partial + r * (a_.head_dim + 2);
      memcpy(partial, s.state + r * a_.head_dim, static_cast<size_t>(a_.head_dim) * 4);
      partial[a_.head_dim] = s.base[r];
      partial[a_.head_dim + 1] = total(r, s);
    }
  }

  void store(const Unit &unit, int64_t r, const float *state, float base, float total) const {
    int64_t row = unit.first_row + r;
    int64_t token = a_.query_starts[unit.sequence] + row / a_.group;
    int64_t head = unit.kv_head * a_.group + row % a_.group;
    int64_t width = a_.num_kv_heads * a_.group * a_.head_dim, column = head * a_.head_dim;
    if (a_.sinks) total += power_of_two(a_.sinks[head] * kLog2E - base);
    __m512 scale = _mm512_set1_ps(1.0f / total);
    for (int64_t i = 0; i < a_.head_dim; i += 16) {
      auto out = static_cast<uint16_t *>(a_.out) + tiled(token, column + i, width);
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(out),
                          to_bfloat16(_mm512_mul_ps(scale, _mm512_loadu_ps(state + i))));
    }
  }

  const tw_attention &a_;
  int64_t head_size_;
  int64_t decodes_ = 0;  // sequences before the first chunk: as many tokens
};

thread_local Buffer unit_buffer;
thread_local Buffer partial_buffer;

struct Plan {
  const Unit *units;
  int64_t num_units, num_decodes;
  bool is_cut;  // some unit is a part of one
};

// Parts that a sequence's context is cut into.
int64_t count_parts(const tw_attention &a, int64_t sequence) {
  return is_decode(a, sequence) ? divide_up(a.context_lengths[sequence], kPart) : 1;
}

// Lists the step's units. A chunk's last rows see most keys and come
// first, so that no thread is left with a long unit at the end.
Plan plan(const tw_attention &a, int64_t leading, int64_t part_size) {
  int64_t num_units = 0, num_parts = 0;
  for (int64_t s = 0; s < a.sequences; s++) {
    int64_t rows = (a.query_starts[s + 1] - a.query_starts[s]) * a.group, parts = count_parts(a, s);
    int64_t units = divide_up(rows, kMostRows) * a.num_kv_heads * parts;
    num_units += units;
    if (parts > 1) num_parts += units;
  }
  auto units = static_cast<Unit *>(
      unit_buffer.reserve(num_units * static_cast<int64_t>(sizeof(Unit))));
  auto partial = static_cast<float *>(
      partial_buffer.reserve(num_parts * part_size * static_cast<int64_t>(sizeof(float))));
  Unit *unit = units;
  int64_t num_decodes = 0;
  for (int64_t s = 0; s < a.sequences; s++) {
    int64_t length = a.query_starts[s + 1] - a.query_starts[s], rows = length * a.group;
    int64_t context = a.context_lengths[s], parts = count_parts(a, s);
    for (int64_t h = 0; h < a.num_kv_heads; h++)
      for (int64_t block = divide_up(rows, kMostRows) - 1; block >= 0; block--) {
        int64_t row = block * kMostRows, count = smaller(kMostRows, rows - row);
        int64_t lowest = context - length + row / a.group;
        int64_t highest = context - length + (row + count - 1) / a.group;
        int64_t seen = a.window ? larger(lowest + 1 - a.window, 0) / kTileInner * kTileInner : 0;
        for (int64_t part = 0; part < parts; part++) {
          int64_t first = larger(part * kPart, seen);
          int64_t last = parts > 1 ? smaller((part + 1) * kPart, context) : highest + 1;
          *unit++ = {s, h, row, count, first, last, parts > 1 ? partial : nullptr, part ? 0 : parts};
          if (parts > 1) partial += part_size;
        }
      }
    if (s < leading) num_decodes = unit - units;
  }
  return {units, num_units, num_decodes, num_parts > 0};
}

}  // namespace

void tw_amx_attend(const tw_attention *attention) {
  const tw_attention &a = *attention;
  Attention kernel(a);
  int64_t part_size = smaller(kMostRows, a.group) * (a.head_dim + 2);
  const Plan work = plan(a, kernel.decodes(), part_size);
  parallel_for(divide_up(a.tokens, kTokens), [&](int64_t item) {
    int64_t end = smaller((item + 1) * kTokens, a.tokens);
    for (int64_t token = item * kTokens; token < end; token++) kernel.write(token);
  });
  // Decodes come several to an item, so that a thread knows what it goes on with.
  int64_t together = smaller(larger(work.num_decodes / (kShares * num_threads()), 1), kTogether);
  int64_t groups = divide_up(work.num_decodes, together);
  parallel_for(groups + work.num_units - work.num_decodes, [&](int64_t item) {
    bool decodes = item < groups;
    int64_t first = decodes ? item * together : work.num_decodes + item - groups;
    int64_t last = decodes ? smaller(first + together, work.num_decodes) : first + 1;
    Scratch scratch;
    int64_t configured = 0;
    for (int64_t i = first; i < last; i++) {
      int64_t rows = work.units[i].num_rows;
      if (rows != configured) configure_tiles(configured = rows);
      kernel.attend(work.units[i], i + 1 < last ? work.units + i + 1 : nullptr, scratch);
    }
    _tile_release();
  });
  if (work.is_cut)
    parallel_for(work.num_units, [&](int64_t i) {
      if (work.units[i].parts > 1) kernel.merge(work.units[i], work.units[i].parts, part_size);
    });
}
