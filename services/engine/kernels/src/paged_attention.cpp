// Attention over the paged cache in runs of 16 tokens, one kernel for decodes and prompt chunks.
//
// Query heads that share a key head become rows of one matrix (row = query * group + head), so that
// a key is read once for all of them. Sums are float32, whatever the cache's type.
//
// TW_PAGED is the name of the function that this compilation defines. Everything else is in an
// anonymous namespace, and no standard template is instantiated (see portable.cpp).
#include "paged_attention.h"

#include <string.h>

#include "attention_units.h"
#include "buffer.h"
#include "cache_numbers.h"
#include "integers.h"
#include "paged_products.h"
#include "threads.h"

namespace {

constexpr int64_t kMostRows = 48;  // of a unit
constexpr int64_t kTokens = 16;    // tokens written by a loop's item
constexpr int64_t kSpanLanes = kSpan / kLanes;
constexpr float kLowest = -1e30f;  // finite, so that a difference of two is not NaN
constexpr float kInfinity = __builtin_inff();
constexpr int64_t kBlock = 32;  // rows and columns of a block of a tiled activation

thread_local Buffer scratch_buffer;

// Memory of a unit.
struct Scratch {
  float *queries;  // a tile after the other, [head_dim, rows] each
  float *scores;   // [rows, kSpan], then weights
  float *state;    // [rows, width] weighted values, not yet divided
  float totals[kMostRows][kLanes];  // sum of the weights in each lane
  float base[kMostRows];            // scores become weights as 2^(score - base)
};

// Rows of a unit that are multiplied together.
struct Tile {
  int64_t first, count;
};

// T: of queries, keys, values and the output; Number: of the cache.
template <typename T, typename Number>
class Attention {
 public:
  explicit Attention(const tw_attention &a)
      : a_(a),
        key_width_(divide_up(a.head_dim, kRun) * kRun),
        width_(divide_up(a.value_dim, kRun) * kRun),
        places_(divide_up(a.block_size, kRun) * kRun),
        key_bytes_(kRun * (key_width_ * kSize + kScales)),
        value_bytes_(kRun * (width_ * kSize + kScales)) {}

  // Floats of a row's state in a part of a context.
  int64_t state_size() const { return width_ + 2; }

  // Writes one token's keys and values.
  void write(int64_t token) const {
    const int64_t slot = a_.slots[token], place = slot % a_.block_size, in_run = place % kRun;
    for (int64_t h = 0; h < a_.num_kv_heads; h++) {
      const int64_t from = token * a_.row_stride, run = run_at(slot / a_.block_size, h, place);
      write_row(static_cast<const T *>(a_.keys) + from + h * a_.head_dim, a_.head_dim,
                static_cast<uint8_t *>(a_.key_cache) + run * key_bytes_, key_width_, in_run, in_run,
                kRun);
      write_row(static_cast<const T *>(a_.values) + from + h * a_.value_dim, a_.value_dim,
                static_cast<uint8_t *>(a_.value_cache) + run * value_bytes_, width_, in_run,
                in_run * width_, 1);
    }
  }

  void attend(const Unit &unit) const {
    Scratch s = scratch();
    load_queries(unit, s);
    const int64_t end = unit.last_key > unit.first_key ? place_after(unit.last_key) : 0;
    Span<Number> span = span_at(unit, place_of(unit.first_key) / kRun * kRun, end), ahead;
    for (; span.count > 0; span = ahead) {
      ahead = span_at(unit, span.first + kSpan, end);
      const Span<Number> &fetched = ahead.count > 0 ? ahead : span;
      for_tiles(unit, [&](Tile tile, auto rows) {
        score_tile<decltype(rows)::count>(span, fetched, s.queries + tile.first * a_.head_dim,
                                          a_.head_dim, s.scores + tile.first * kSpan);
      });
      for (int64_t r = 0; r < unit.num_rows; r++) weigh(unit, r, span, s);
      for_tiles(unit, [&](Tile tile, auto rows) {
        gather_tile<decltype(rows)::count>(span, fetched, s.scores + tile.first * kSpan, width_,
                                           s.state + tile.first * width_);
      });
    }
    for (int64_t r = 0; r < unit.num_rows; r++) {
      const float *state = s.state + r * width_, total = sum_of(widen(s.totals[r]));
      if (unit.partial)
        keep(state, s.base[r], total, unit.partial + r * state_size());
      else
        finish(unit, r, state, s.base[r], total);
    }
  }

  // Merges the parts of a unit. unit.partial: the first part's state; part_size: floats of a part.
  void merge(const Unit &unit, int64_t part_size) const {
    Scratch s = scratch();
    for (int64_t r = 0; r < unit.num_rows; r++) {
      const float *first = unit.partial + r * state_size();
      float highest = kLowest, total = 0;
      for (int64_t p = 0; p < unit.parts; p++) {
        const float base = first[p * part_size + width_];
        highest = base > highest ? base : highest;
      }
      memset(s.state, 0, static_cast<size_t>(width_) * sizeof(float));
      for (int64_t p = 0; p < unit.parts; p++) {
        const float *part = first + p * part_size, factor = power_of_two(part[width_] - highest);
        total += part[width_ + 1] * factor;
        for (int64_t i = 0; i < width_; i += kLanes)
          store(s.state + i, widen(s.state + i) + factor * widen(part + i));
      }
      finish(unit, r, s.state, highest, total);
    }
  }

 private:
  static constexpr bool kScaled = sizeof(Number) == 1;
  static constexpr int64_t kSize = sizeof(Number), kScales = kScaled ? sizeof(float) : 0;

  // Returns a key's place among those of the sequence's blocks. The last run of a block has places
  // without keys unless block_size is a multiple of 16.
  int64_t place_of(int64_t key) const {
    return places_ == a_.block_size ? key
                                    : key / a_.block_size * places_ + key % a_.block_size;
  }

  // Returns the place after the last of so many keys.
  int64_t place_after(int64_t keys) const { return keys > 0 ? place_of(keys - 1) + 1 : 0; }

  // Returns the number of the run of a block's place, among those of a cache.
  int64_t run_at(int64_t block, int64_t kv_head, int64_t place) const {
    const int64_t head = block * a_.num_kv_heads + kv_head;
    return head * (places_ / kRun) + place / kRun;
  }

  // Returns the scales of the tokens of a run whose heads have `width` numbers.
  static const float *scales_of(const Number *run, int64_t width) {
    return reinterpret_cast<const float *>(run + kRun * width);
  }

  // Writes the `count` numbers of one head of a token, `step` apart from `first` on, to a run whose
  // heads have `width`.
  static void write_row(const T *from, int64_t count, uint8_t *run, int64_t width, int64_t in_run,
                        int64_t first, int64_t step) {
    Number *to = reinterpret_cast<Number *>(run) + first;
    if constexpr (kScaled) {
      float most = 0;
      for (int64_t i = 0; i < count; i++) {
        const float size = __builtin_fabsf(load(from[i]));
        most = size > most || size != size ? size : most;  // a NaN stays
      }
      // NaN and infinity are in the scale: of them, and of numbers near 0, there are no integers.
      const bool fits = most > 1e-30f && most <= 3.4e38f;
      const float scale = most / 127, inverse = fits ? 127 / most : 0;
      memcpy(run + kRun * width + in_run * kScales, &scale, sizeof scale);
      for (int64_t i = 0; i < count; i++)
        to[i * step] =
            fits ? static_cast<int8_t>(__builtin_rintf(load(from[i]) * inverse)) : 0;
    } else {
      for (int64_t i = 0; i < count; i++) store(to + i * step, load(from[i]));
    }
  }

  Scratch scratch() const {
    const int64_t rows = kMostRows * (width_ + kSpan + a_.head_dim);
    Scratch s;
    s.state = static_cast<float *>(
        scratch_buffer.reserve(rows * static_cast<int64_t>(sizeof(float))));
    s.scores = s.state + kMostRows * width_;
    s.queries = s.scores + kMostRows * kSpan;
    return s;
  }

  // Calls body(tile, Rows) for tiles of a unit's rows, about equally many each.
  template <typename Body>
  void for_tiles(const Unit &unit, const Body &body) const {
    const int64_t tiles = divide_up(unit.num_rows, kTileRows);
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t first = unit.num_rows * t / tiles;
      const Tile tile{first, unit.num_rows * (t + 1) / tiles - first};
      with_rows(tile.count, [&](auto rows) { body(tile, rows); });
    }
  }

  // Returns the unit's keys at the places from `first` to `end`.
  Span<Number> span_at(const Unit &unit, int64_t first, int64_t end) const {
    Span<Number> span;
    span.first = first;
    span.count = smaller(kSpan, end - first);
    const int32_t *blocks = a_.block_tables + unit.sequence * a_.table_stride;
    int64_t at = 0;
    for (int64_t run = 0; run < kRuns && span.count > 0; run++) {
      const int64_t place = first + run * kRun;
      if (place < end) at = run_at(blocks[place / places_], unit.kv_head, place % places_);
      const auto keys = static_cast<const uint8_t *>(a_.key_cache) + at * key_bytes_;
      const auto values = static_cast<const uint8_t *>(a_.value_cache) + at * value_bytes_;
      span.keys[run] = reinterpret_cast<const Number *>(keys);
      span.values[run] = reinterpret_cast<const Number *>(values);
    }
    return span;
  }

  // Returns the token, among the step's queries, of a unit's row.
  int64_t token_of(const Unit &unit, int64_t r) const {
    return a_.query_starts[unit.sequence] + (unit.first_row + r) / a_.group;
  }

  int64_t head_of(const Unit &unit, int64_t r) const {
    return unit.kv_head * a_.group + (unit.first_row + r) % a_.group;
  }

  // Copies the unit's queries, scaled, into tiles and resets the sums. Scores are then exponents of
  // 2, or arguments of the soft cap.
  void load_queries(const Unit &unit, Scratch &s) const {
    const float scale = a_.cap ? a_.scale / a_.cap : a_.scale * kLog2E;
    for_tiles(unit, [&](Tile tile, auto) {
      for (int64_t r = 0; r < tile.count; r++) {
        const int64_t row = tile.first + r;
        const T *from = static_cast<const T *>(a_.queries) + token_of(unit, row) * a_.row_stride +
                        head_of(unit, row) * a_.head_dim;
        float *to = s.queries + tile.first * a_.head_dim + r;
        for (int64_t i = 0; i < a_.head_dim; i++) to[i * tile.count] = load(from[i]) * scale;
      }
    });
    memset(s.state, 0, static_cast<size_t>(unit.num_rows * width_) * sizeof(float));
    memset(s.totals, 0, static_cast<size_t>(unit.num_rows * kLanes) * sizeof(float));
    for (int64_t r = 0; r < unit.num_rows; r++) s.base[r] = kLowest;
  }

  // Turns a row's scores into weights by an online softmax (https://arxiv.org/abs/1805.02867).
  void weigh(const Unit &unit, int64_t r, const Span<Number> &span, Scratch &s) const {
    Lanes scores[kSpanLanes];
    read_scores(s.scores + r * kSpan, span, scores);
    if (a_.slopes) lower_by_distance(unit, r, span, scores);
    hide(unit, r, span, scores);
    Lanes highest = scores[0];
    for (int64_t i = 1; i < kSpanLanes; i++) highest = at_least(scores[i], highest);
    const float found = highest_of(highest);
    if (found > s.base[r]) raise_base(r, found, s);
    const Lanes base = broadcast(s.base[r]);
    Lanes total = widen(s.totals[r]);
    for (int64_t i = 0; i < kSpanLanes; i++) {
      Lanes weights = power_of_two(scores[i] - base);
      total += weights;
      if constexpr (kScaled) {
        const int64_t lane = i * kLanes;
        weights *= widen(scales_of(span.values[lane / kRun], width_) + lane % kRun);
      }
      store(s.scores + r * kSpan + i * kLanes, weights);
    }
    store(s.totals[r], total);
  }

  void read_scores(const float *from, const Span<Number> &span, Lanes *scores) const {
    for (int64_t i = 0; i < kSpanLanes; i++) {
      const int64_t lane = i * kLanes;
      scores[i] = widen(from + lane);
      if constexpr (kScaled)
        scores[i] *= widen(scales_of(span.keys[lane / kRun], key_width_) + lane % kRun);
      if (a_.cap) scores[i] = a_.cap * kLog2E * hyperbolic_tangent(scores[i]);
    }
  }

  // Returns the position of a row's own key.
  int64_t position_of(const Unit &unit, int64_t r) const {
    return a_.context_lengths[unit.sequence] - a_.query_starts[unit.sequence + 1] +
           token_of(unit, r);
  }

  // Adds the bias of each key's distance to scores. A run lies in one block, so its keys follow each
  // other.
  void lower_by_distance(const Unit &unit, int64_t r, const Span<Number> &span,
                         Lanes *scores) const {
    const float slope = a_.slopes[head_of(unit, r)] * kLog2E;
    const int64_t position = position_of(unit, r);
    Lanes lane;
    for (int64_t i = 0; i < kLanes; i++) lane[i] = static_cast<float>(i);
    for (int64_t i = 0; i < kSpanLanes; i++) {
      const int64_t place = span.first + i * kLanes;
      const int64_t key = place / places_ * a_.block_size + place % places_;
      scores[i] += slope * (lane + static_cast<float>(key - position));
    }
  }

  // Makes the weights of the keys that a row does not see zero.
  void hide(const Unit &unit, int64_t r, const Span<Number> &span, Lanes *scores) const {
    const int64_t token = token_of(unit, r), position = position_of(unit, r);
    const int64_t seen = a_.window ? position + 1 - a_.window : 0;
    const int64_t oldest = place_of(larger(seen, unit.first_key));
    const int64_t end =
        place_after(smaller(a_.ends ? a_.ends[token] : position + 1, unit.last_key));
    const bool is_padded = places_ != a_.block_size;
    if (oldest <= span.first && span.first + kSpan <= end && !is_padded) return;
    Integers lane;
    for (int64_t i = 0; i < kLanes; i++) lane[i] = static_cast<int32_t>(i);
    Integers index = lane;
    const int32_t first = static_cast<int32_t>(larger(oldest - span.first, 0));
    const int32_t last = static_cast<int32_t>(larger(smaller(end - span.first, kSpan), 0));
    for (int64_t i = 0; i < kSpanLanes; i++, index += static_cast<int32_t>(kLanes)) {
      Integers is_seen = (index >= first) & (index < last);
      if (is_padded)
        is_seen &= lane < static_cast<int32_t>(a_.block_size - (span.first + i * kLanes) % places_);
      scores[i] = is_seen ? scores[i] : broadcast(-kInfinity);
    }
  }

  void raise_base(int64_t r, float base, Scratch &s) const {
    const Lanes factor = power_of_two(broadcast(s.base[r] - base));
    s.base[r] = base;
    store(s.totals[r], widen(s.totals[r]) * factor);
    float *state = s.state + r * width_;
    for (int64_t i = 0; i < width_; i += kLanes) store(state + i, widen(state + i) * factor);
  }

  void keep(const float *state, float base, float total, float *to) const {
    memcpy(to, state, static_cast<size_t>(width_) * sizeof(float));
    to[width_] = base;
    to[width_ + 1] = total;
  }

  // Stores the output of a row.
  void finish(const Unit &unit, int64_t r, const float *state, float base, float total) const {
    const int64_t token = token_of(unit, r), head = head_of(unit, r);
    if (a_.sinks) total += power_of_two(a_.sinks[head] * kLog2E - base);
    // A row that sees no key has no values to divide: its output is zero.
    const float scale = total == 0 ? 0.0f : 1.0f / total;
    const int64_t outputs = a_.num_kv_heads * a_.group * a_.value_dim;
    T *out = static_cast<T *>(a_.out);
    if (!a_.is_tiled) {
      out += token * outputs + head * a_.value_dim;
      for (int64_t i = 0; i < a_.value_dim; i++) store(out + i, state[i] * scale);
      return;
    }
    out += token / kBlock * kBlock * outputs + token % kBlock * kBlock;
    for (int64_t i = 0; i < a_.value_dim; i++) {
      const int64_t column = head * a_.value_dim + i;
      store(out + column / kBlock * kBlock * kBlock + column % kBlock, state[i] * scale);
    }
  }

  const tw_attention &a_;
  // Numbers of a head's key and of its value in the cache; those past the head's are not used.
  const int64_t key_width_, width_;
  const int64_t places_;  // of a block, those of its last run included
  const int64_t key_bytes_, value_bytes_;  // of a run
};

template <typename T, typename Number>
void attend(const tw_attention &a) {
  const Attention<T, Number> kernel(a);
  const int64_t part_size = smaller(kMostRows, a.group) * kernel.state_size();
  const Plan work = plan(a, 0, part_size, kMostRows, kRun);
  if (a.keys)
    parallel_for(divide_up(a.tokens, kTokens), [&](int64_t item) {
      const int64_t end = smaller((item + 1) * kTokens, a.tokens);
      for (int64_t token = item * kTokens; token < end; token++) kernel.write(token);
    });
  parallel_for(work.num_units, [&](int64_t i) { kernel.attend(work.units[i]); });
  if (work.is_cut)
    parallel_for(work.num_units, [&](int64_t i) {
      if (work.units[i].parts > 1) kernel.merge(work.units[i], part_size);
    });
}

template <typename T>
void attend_over(const tw_attention &a) {
  switch (a.cache_dtype) {
    case TW_FLOAT32: return attend<T, float>(a);
    case TW_BFLOAT16: return attend<T, bfloat16>(a);
    case TW_FLOAT16: return attend<T, float16>(a);
    case TW_SCALED_INT8: return attend<T, int8_t>(a);
  }
}

}  // namespace

void TW_PAGED(const tw_attention *attention) {
  (attention->dtype == TW_FLOAT32 ? attend_over<float> : attend_over<bfloat16>)(*attention);
}
