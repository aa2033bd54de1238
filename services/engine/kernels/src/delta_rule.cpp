// Gated delta rule (https://arxiv.org/abs/2412.06464), compiled once per instruction set.
//
// TW_DELTA is the name of the function that this compilation defines. Everything else is in an
// anonymous namespace, and no standard template is instantiated (see portable.cpp).
#include "delta_rule.h"

#include <math.h>
#include <string.h>
#if defined(TW_X86_64)
#include <immintrin.h>
#endif

#include "buffer.h"
#include "chains.h"
#include "delta_products.h"
#include "denormals.h"
#include "exponential.h"
#include "scalars.h"
#include "threads.h"

namespace {

constexpr int64_t kChunk = 32;  // tokens that are computed by one set of products

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Returns e^(-rate * softplus(x)), or e^(least * sigmoid(rate * x)) if decays are bounded.
inline float decay_of(float x, float rate, float least) {
  if (least < 0) return exponential(least * sigmoid(rate * x));
  return exponential(-rate * (x > 20.0f ? x : log1pf(exponential(x))));
}

// One thread's memory for a head's tokens and state.
struct Scratch {
  float *state;             // [value panels][key_pad][kPanel]
  float *window;            // [conv_width - 1 + kChunk][channels]: the convolution's inputs
  float *queries, *keys;    // [kChunk][key_pad]
  float *grown_queries, *grown_keys;  // times the decay since the chunk's start; keys times -1
  float *decayed;           // [kChunk][key_pad], keys times the decay since them
  float *decays;            // [kChunk][key_pad]
  float *grown;             // [key_pad], decay since the chunk's start
  float *columns;           // [key_pad][kPanel], keys of a chunk's tokens side by side
  float *known, *read;      // [kChunk][kPanel], what a token knows and reads of each one before it
  float *values, *outputs;  // [kChunk][value_pad]; values become corrections
  float *betas;             // [kChunk]
};

thread_local Buffer memory;

// T: of the activations. S: of the recurrent state.
template <typename T, typename S>
class Head {
 public:
  Head(const tw_delta &d, int64_t head)
      : d_(d),
        head_(head),
        key_head_(head / (d.value_heads / d.key_heads)),
        owns_key_(head % (d.value_heads / d.key_heads) == 0),
        channels_(2 * d.key_dim + d.value_dim),
        key_pad_(round_up(d.key_dim, kPad)),
        value_pad_(round_up(d.value_dim, kPanel)),
        past_(d.conv_width - 1) {
    const int64_t keys = kChunk * key_pad_, values = kChunk * value_pad_;
    const int64_t pairs = kChunk * kPanel;
    const int64_t sizes[] = {key_pad_ * value_pad_, (past_ + kChunk) * channels_, keys, keys, keys,
                             keys, keys, keys, key_pad_, key_pad_ * kPanel, pairs, pairs, values,
                             values, kChunk};
    float **parts[] = {&s_.state, &s_.window, &s_.queries, &s_.keys, &s_.grown_queries,
                       &s_.grown_keys, &s_.decayed, &s_.decays, &s_.grown, &s_.columns, &s_.known,
                       &s_.read, &s_.values, &s_.outputs, &s_.betas};
    int64_t total = 0;
    for (int64_t size : sizes) total += round_up(size, 16);
    float *at = static_cast<float *>(memory.reserve(total * 4));
    for (int64_t i = 0; i < 15; i++) {
      *parts[i] = at;
      at += round_up(sizes[i], 16);
    }
    // Padding columns stay zero.
    if (key_pad_ != d.key_dim) {
      float *const padded[] = {s_.queries, s_.keys, s_.decays};
      for (float *rows : padded) memset(rows, 0, static_cast<size_t>(keys) * 4);
    }
    if (value_pad_ != d.value_dim) memset(s_.values, 0, static_cast<size_t>(values) * 4);
  }

  // Computes runs first to last - 1, each of which continues the run before it.
  void run(int64_t first, int64_t last) {
    load_window(d_.sources[first]);
    for (int64_t run = first; run < last; run++) {
      const int64_t begin = d_.starts[run], length = d_.starts[run + 1] - begin;
      const bool is_last = run + 1 == last;
      if (length == 1) {
        prepare(begin, 1);
        step(begin, d_.sources[run], d_.targets[run], is_last);
        slide(1);
      } else {
        load_state(d_.sources[run]);
        for (int64_t done = 0; done < length; done += kChunk) {
          const int64_t count = minimum(kChunk, length - done);
          prepare(begin + done, count);
          advance(count);
          for (int64_t t = 0; t < count; t++)
            finish(begin + done + t, s_.outputs + t * value_pad_);
          slide(count);
        }
        store_state(d_.targets[run]);
      }
      store_window(d_.targets[run]);
    }
  }

 private:
  // A head's queries, keys or values among the convolution's channels.
  struct Segment {
    int64_t first, width, at;  // channel in the model, channels, channel in the window
  };

  Segment segment(int64_t index) const {
    const int64_t all_keys = d_.key_heads * d_.key_dim;
    if (index < 2)
      return {index * all_keys + key_head_ * d_.key_dim, d_.key_dim, index * d_.key_dim};
    return {2 * all_keys + head_ * d_.value_dim, d_.value_dim, 2 * d_.key_dim};
  }

  int64_t all_channels() const {
    return 2 * d_.key_heads * d_.key_dim + d_.value_heads * d_.value_dim;
  }

  S *state_of(int64_t slot) const {
    return static_cast<S *>(d_.recurrent) +
           (slot * d_.value_heads + head_) * d_.key_dim * d_.value_dim;
  }

  void load_window(int64_t slot) {
    if (slot < 0) {
      memset(s_.window, 0, static_cast<size_t>(past_ * channels_) * 4);
      return;
    }
    const T *from = static_cast<const T *>(d_.windows) + slot * past_ * all_channels();
    for (int64_t row = 0; row < past_; row++) load_channels(from + row * all_channels(), row);
  }

  void load_channels(const T *from, int64_t row) {
    for (int64_t index = 0; index < 3; index++) {
      const Segment part = segment(index);
      const T *in = from + part.first;
      float *to = s_.window + row * channels_ + part.at;
#pragma omp simd
      for (int64_t i = 0; i < part.width; i++) to[i] = load(in[i]);
    }
  }

  // Makes the last tokens of a chunk the past of the next one.
  void slide(int64_t count) {
    memmove(s_.window, s_.window + count * channels_, static_cast<size_t>(past_ * channels_) * 4);
  }

  // Value heads share queries and keys: the first of them stores those.
  void store_window(int64_t slot) const {
    for (int64_t row = 0; row < past_; row++) {
      T *to = static_cast<T *>(d_.windows) + (slot * past_ + row) * all_channels();
      for (int64_t index = owns_key_ ? 0 : 2; index < 3; index++) {
        const Segment part = segment(index);
        const float *from = s_.window + row * channels_ + part.at;
#pragma omp simd
        for (int64_t i = 0; i < part.width; i++) store(to + part.first + i, from[i]);
      }
    }
  }

  void convolve(int64_t t, Segment part, float *to) const {
    const float *from = s_.window + t * channels_ + part.at;
    const int64_t channels = channels_, all = all_channels(), width = d_.conv_width;
    const float *weights = d_.convolution + part.first;
    const float *bias = d_.convolution_bias ? d_.convolution_bias + part.first : nullptr;
#pragma omp simd
    for (int64_t i = 0; i < part.width; i++) to[i] = bias ? bias[i] : 0.0f;
    for (int64_t j = 0; j < width; j++) {
#pragma omp simd
      for (int64_t i = 0; i < part.width; i++)
        to[i] += weights[j * all + i] * from[j * channels + i];
    }
#pragma omp simd
    for (int64_t i = 0; i < part.width; i++) to[i] *= sigmoid(to[i]);
  }

  void normalize(float *vector, float scale) const {
    scale /= __builtin_sqrtf(dot(vector, vector, d_.key_dim) + 1e-6f);
#pragma omp simd
    for (int64_t i = 0; i < d_.key_dim; i++) vector[i] *= scale;
  }

  // Computes queries, keys, values, betas and decays of `count` tokens.
  void prepare(int64_t token, int64_t count) {
    const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(d_.key_dim));
    for (int64_t t = 0; t < count; t++)
      load_channels(static_cast<const T *>(d_.mixed) + (token + t) * d_.mixed_stride, past_ + t);
    for (int64_t t = 0; t < count; t++) {
      float *query = s_.queries + t * key_pad_, *key = s_.keys + t * key_pad_;
      convolve(t, segment(0), query);
      convolve(t, segment(1), key);
      convolve(t, segment(2), s_.values + t * value_pad_);
      normalize(query, query_scale);
      normalize(key, 1.0f);
      const T *beta = static_cast<const T *>(d_.beta) + (token + t) * d_.beta_stride;
      s_.betas[t] = sigmoid(load(beta[head_])) * (d_.doubles_beta ? 2.0f : 1.0f);
      decay(token + t, s_.decays + t * key_pad_);
    }
  }

  void decay(int64_t token, float *to) const {
    const T *from = static_cast<const T *>(d_.decay) + token * d_.decay_stride;
    const float rate = d_.rates[head_], least = d_.least_decay;
    if (!d_.decays_channels) {
      const float factor = decay_of(load(from[head_]) + d_.decay_bias[head_], rate, least);
      for (int64_t i = 0; i < d_.key_dim; i++) to[i] = factor;
      return;
    }
    const int64_t first = head_ * d_.key_dim;
    for (int64_t i = 0; i < d_.key_dim; i++)
      to[i] = decay_of(load(from[first + i]) + d_.decay_bias[first + i], rate, least);
  }

  // Advances the state in `source` by one token into `target`. The state is read from memory once:
  // the output is S^T query + (query . key) correction, with the decayed S before the token.
  void step(int64_t token, int64_t source, int64_t target, bool is_last) {
    const int64_t width = d_.value_dim, keys = d_.key_dim;
    float *query = s_.grown_queries, *key = s_.grown_keys;
#pragma omp simd
    for (int64_t i = 0; i < keys; i++) {
      query[i] = s_.queries[i] * s_.decays[i];
      key[i] = s_.keys[i] * s_.decays[i];
    }
    float *known = s_.state, *out = s_.outputs;
    memset(known, 0, static_cast<size_t>(width) * 4);
    memset(out, 0, static_cast<size_t>(width) * 4);
    const S *from = source < 0 ? nullptr : state_of(source);
    if (from) read_state(from, query, key, out, known);
    const float beta = s_.betas[0], both = dot(s_.queries, s_.keys, keys);
    float *correction = known;
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
      correction[i] = beta * (s_.values[i] - known[i]);
      out[i] += both * correction[i];
    }
    write_state(from, state_of(target), correction, is_last);
    finish(token, out);
  }

  void read_state(const S *from, const float *query, const float *key, float *out,
                  float *known) const {
    const int64_t width = d_.value_dim;
    int64_t k = 0;
    for (; k + 4 <= d_.key_dim; k += 4) {
      const S *row = from + k * width;
#pragma omp simd
      for (int64_t i = 0; i < width; i++) {
        const float a = load(row[i]), b = load(row[width + i]);
        const float c = load(row[2 * width + i]), e = load(row[3 * width + i]);
        known[i] += key[k] * a + key[k + 1] * b + key[k + 2] * c + key[k + 3] * e;
        out[i] += query[k] * a + query[k + 1] * b + query[k + 2] * c + query[k + 3] * e;
      }
    }
    for (; k < d_.key_dim; k++) {
#pragma omp simd
      for (int64_t i = 0; i < width; i++) {
        known[i] += key[k] * load(from[k * width + i]);
        out[i] += query[k] * load(from[k * width + i]);
      }
    }
  }

  // Writes decay * state + key * correction. Nothing reads the last state of a chain in this step,
  // so it need not enter the caches.
  void write_state(const S *from, S *to, const float *correction, bool is_last) const {
    const int64_t width = d_.value_dim;
    const bool streams = is_last && sizeof(S) == 4 && width % kLanes == 0 &&
                         reinterpret_cast<uintptr_t>(to) % 64 == 0;
    for (int64_t k = 0; k < d_.key_dim; k++, to += width) {
      const float decay = s_.decays[k], key = s_.keys[k];
      if (streams) {
        stream_row(reinterpret_cast<const float *>(from), reinterpret_cast<float *>(to), correction,
                   decay, key);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < width; i++)
          store(to + i, (from ? decay * load(from[i]) : 0.0f) + key * correction[i]);
      }
      if (from) from += width;
    }
#if defined(__AVX2__)
    if (streams) _mm_sfence();
#endif
  }

  void stream_row(const float *from, float *to, const float *correction, float decay,
                  float key) const {
    for (int64_t i = 0; i < d_.value_dim; i += kLanes) {
      Lanes row = key * load_lanes(correction + i);
      if (from) row += decay * load_lanes(from + i);
#if defined(__AVX512F__)
      _mm512_stream_ps(to + i, row);
#elif defined(__AVX2__)
      _mm256_stream_ps(to + i, row);
#else
      memcpy(to + i, &row, sizeof row);
#endif
    }
  }

  void load_state(int64_t slot) {
    memset(s_.state, 0, static_cast<size_t>(key_pad_ * value_pad_) * 4);
    if (slot < 0) return;
    const S *from = state_of(slot);
    for (int64_t k = 0; k < d_.key_dim; k++, from += d_.value_dim)
      for (int64_t i = 0; i < d_.value_dim; i += kPanel) {
        float *to = s_.state + i * key_pad_ + k * kPanel;
        const int64_t count = minimum(kPanel, d_.value_dim - i);
#pragma omp simd
        for (int64_t j = 0; j < count; j++) to[j] = load(from[i + j]);
      }
  }

  void store_state(int64_t slot) const {
    S *to = state_of(slot);
    for (int64_t k = 0; k < d_.key_dim; k++, to += d_.value_dim)
      for (int64_t i = 0; i < d_.value_dim; i += kPanel) {
        const float *from = s_.state + i * key_pad_ + k * kPanel;
        const int64_t count = minimum(kPanel, d_.value_dim - i);
#pragma omp simd
        for (int64_t j = 0; j < count; j++) store(to + i + j, from[j]);
      }
  }

  // Advances the state by a chunk, and computes its outputs. The corrections U of the tokens depend
  // on each other: U[i] = beta[i] * (value[i] - decayed state^T key[i] - sum of (key[i] . decayed
  // key[j]) U[j] for j < i).
  void advance(int64_t count) {
    const int64_t rows = round_up(count, kPad);
    grow(count, rows);
    memset(s_.outputs, 0, static_cast<size_t>(rows * value_pad_) * 4);
    for (int64_t i = 0; i < value_pad_; i += kPanel) {
      const float *state = s_.state + i * key_pad_;
      multiply(rows, d_.key_dim, {s_.grown_keys, key_pad_, 1}, state, kPanel, s_.values + i,
               value_pad_, nullptr);
      multiply(rows, d_.key_dim, {s_.grown_queries, key_pad_, 1}, state, kPanel, s_.outputs + i,
               value_pad_, nullptr);
    }
    d_.decays_channels ? relate_channels(count) : relate(count, rows);
    for (int64_t t = 0; t < count; t++) correct(t);
    for (int64_t i = 0; i < value_pad_; i += kPanel)
      multiply(rows, count, {s_.read, kPanel, 1}, s_.values + i, value_pad_, s_.outputs + i,
               value_pad_, nullptr);
    for (int64_t i = 0; i < value_pad_; i += kPanel)
      multiply(key_pad_, count, {s_.decayed, 1, key_pad_}, s_.values + i, value_pad_,
               s_.state + i * key_pad_, kPanel, s_.grown);
  }

  // Multiplies queries and keys by the decay since the chunk's start, and clears padding rows.
  void grow(int64_t count, int64_t rows) {
    for (int64_t i = 0; i < key_pad_; i++) s_.grown[i] = 1.0f;
    for (int64_t t = 0; t < count; t++) {
      const int64_t at = t * key_pad_;
#pragma omp simd
      for (int64_t i = 0; i < key_pad_; i++) {
        s_.grown[i] *= s_.decays[at + i];
        s_.grown_queries[at + i] = s_.queries[at + i] * s_.grown[i];
        s_.grown_keys[at + i] = -s_.keys[at + i] * s_.grown[i];
      }
    }
    const auto padding = static_cast<size_t>(rows - count) * 4;
    memset(s_.grown_queries + count * key_pad_, 0, padding * static_cast<size_t>(key_pad_));
    memset(s_.grown_keys + count * key_pad_, 0, padding * static_cast<size_t>(key_pad_));
    memset(s_.values + count * value_pad_, 0, padding * static_cast<size_t>(value_pad_));
  }

  // Computes what each token knows and reads of those before it, and reads of itself, by products:
  // all channels of a token decay alike.
  void relate(int64_t count, int64_t rows) {
    for (int64_t i = 0; i < key_pad_; i++)
      for (int64_t t = 0; t < kPanel; t++)
        s_.columns[i * kPanel + t] = t < count ? s_.keys[t * key_pad_ + i] : 0.0f;
    memset(s_.known, 0, static_cast<size_t>(rows * kPanel) * 4);
    memset(s_.read, 0, static_cast<size_t>(rows * kPanel) * 4);
    multiply(rows, d_.key_dim, {s_.keys, key_pad_, 1}, s_.columns, kPanel, s_.known, kPanel,
             nullptr);
    multiply(rows, d_.key_dim, {s_.queries, key_pad_, 1}, s_.columns, kPanel, s_.read, kPanel,
             nullptr);
    float since[kPanel] = {};  // decay of each token's key until the present one; later tokens: 0
    for (int64_t t = 0; t < count; t++) {
      const float decay = s_.decays[t * key_pad_];
      float *known = s_.known + t * kPanel, *read = s_.read + t * kPanel;
#pragma omp simd
      for (int64_t j = 0; j < kPanel; j++) since[j] *= decay;
      since[t] = 1.0f;
#pragma omp simd
      for (int64_t j = 0; j < kPanel; j++) {
        known[j] *= -since[j];
        read[j] *= since[j];
      }
    }
    for (int64_t t = 0; t < count; t++) {
      const int64_t at = t * key_pad_;
#pragma omp simd
      for (int64_t i = 0; i < key_pad_; i++) s_.decayed[at + i] = s_.keys[at + i] * since[t];
    }
  }

  // The same, where each channel has a decay of its own.
  void relate_channels(int64_t count) {
    for (int64_t t = 0; t < count; t++) {
      const float *query = s_.queries + t * key_pad_, *key = s_.keys + t * key_pad_;
      const float *decay = s_.decays + t * key_pad_;
      for (int64_t j = 0; j < t; j++) {
        float *earlier = s_.decayed + j * key_pad_, a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
        for (int64_t i = 0; i < key_pad_; i++) {
          const float decayed = earlier[i] * decay[i];
          earlier[i] = decayed;
          a -= key[i] * decayed;
          b += query[i] * decayed;
        }
        s_.known[t * kPanel + j] = a;
        s_.read[t * kPanel + j] = b;
      }
      memcpy(s_.decayed + t * key_pad_, key, static_cast<size_t>(key_pad_) * 4);
      s_.read[t * kPanel + t] = dot(query, key, key_pad_);
      memset(s_.read + t * kPanel + t + 1, 0, static_cast<size_t>(kPanel - t - 1) * 4);
    }
  }

  // Computes the correction of a chunk's token from those before it.
  void correct(int64_t t) {
    float *value = s_.values + t * value_pad_;
    add_rows(value, s_.known + t * kPanel, s_.values, t, value_pad_);
#pragma omp simd
    for (int64_t i = 0; i < value_pad_; i++) value[i] *= s_.betas[t];
  }

  // Writes a token's output: its RMSNorm times the gate.
  void finish(int64_t token, const float *from) const {
    const int64_t width = d_.value_dim;
    const T *gate = static_cast<const T *>(d_.gate) + token * d_.gate_stride + head_ * width;
    T *to = static_cast<T *>(d_.out) + token * d_.out_stride + head_ * width;
    const float squares = dot(from, from, width);
    const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + d_.epsilon);
    const float *norm = d_.norm;
    const bool is_silu = d_.is_silu;
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
      const float x = load(gate[i]), open = sigmoid(x);
      store(to + i, from[i] * scale * norm[i] * (is_silu ? x * open : open));
    }
  }

  const tw_delta &d_;
  const int64_t head_, key_head_;
  const bool owns_key_;
  const int64_t channels_, key_pad_, value_pad_, past_;
  Scratch s_;
};

thread_local Buffer firsts;

template <typename T, typename S>
void run(const tw_delta &d) {
  // A chain of runs, each of which reads what the one before it wrote, is computed by one thread.
  auto first = static_cast<int64_t *>(firsts.reserve((d.runs + 1) * 8));
  const int64_t chains = find_chains(d.sources, d.targets, d.runs, first);
  parallel_for(chains * d.value_heads, [&](int64_t item) {
    [[maybe_unused]] const DenormalsAreZero rounding;
    const int64_t chain = item / d.value_heads;
    Head<T, S>(d, item % d.value_heads).run(first[chain], first[chain + 1]);
  });
}

template <typename T>
void run(const tw_delta &d) {
  d.state_dtype == TW_FLOAT32 ? run<T, float>(d) : run<T, bfloat16>(d);
}

}  // namespace

void TW_DELTA(const tw_delta *delta) {
  delta->dtype == TW_FLOAT32 ? run<float>(*delta) : run<bfloat16>(*delta);
}
