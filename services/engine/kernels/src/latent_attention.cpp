// Multi-head latent attention of decodes (https://arxiv.org/abs/2405.04434), compiled once per
// instruction set. In the absorbed form a query is multiplied by its head's keys first, so that all
// heads read the same page: a score is (query @ keys) . latent, and an output is
// (weighted latents) @ values.
//
// TW_LATENT is the name of the function that this compilation defines. Everything else is in an
// anonymous namespace, and no standard template is instantiated (see portable.cpp).
#include "latent_attention.h"

#include <string.h>
#if defined(TW_X86_64)
#include <immintrin.h>
#endif

#include "buffer.h"
#include "exponential.h"
#include "scalars.h"
#include "threads.h"

namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kColumns = 4;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8, kColumns = 2;
#else
constexpr int64_t kLanes = 4, kColumns = 2;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

constexpr int64_t kRows = 4;     // that are computed at once
constexpr int64_t kWide = 8;     // vectors of a single row that are computed at once
constexpr int64_t kInner = 32;   // rows of the right factor that stay in the L1 cache
constexpr int64_t kPiece = 128;  // cached tokens whose weights are computed together
// A context is cut into at most so many parts, each of which may run on another thread. Parts are
// independent of the number of threads, so that a result depends neither on the machine nor on the
// rest of the batch.
constexpr int64_t kMostParts = 32;
constexpr int64_t kMostNumbers = 1 << 23;  // of queries and states that are in memory at once

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline Lanes load_lanes(const float *from) {
  Lanes lanes;
  memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline Lanes load_lanes(const bfloat16 *from) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#elif defined(__AVX2__)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
  Lanes lanes;
  for (int64_t i = 0; i < kLanes; i++) lanes[i] = load(from[i]);
  return lanes;
#endif
}

inline void store_lanes(float *to, Lanes lanes) { memcpy(to, &lanes, sizeof lanes); }

inline float sum_of(Lanes lanes) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < kLanes; i++) sum += lanes[i];
  return sum;
}

// Rows of floats, `stride` apart.
struct Rows {
  float *first;
  int64_t stride;

  float *row(int64_t index) const { return first + index * stride; }
};

// out[r][c] = left[r] . right[c], for kCount rows and kOthers columns from `column` on.
template <int kCount, int kOthers, typename T>
void dot(Rows left, const T *const *right, int64_t width, int64_t column, Rows out) {
  const int64_t whole = width / kLanes * kLanes;
  Lanes sums[kCount][kOthers] = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    Lanes others[kOthers];
#pragma GCC unroll 4
    for (int c = 0; c < kOthers; c++) others[c] = load_lanes(right[column + c] + i);
#pragma GCC unroll 4
    for (int r = 0; r < kCount; r++) {
      const Lanes own = load_lanes(left.row(r) + i);
#pragma GCC unroll 4
      for (int c = 0; c < kOthers; c++) sums[r][c] += own * others[c];
    }
  }
  for (int r = 0; r < kCount; r++)
    for (int c = 0; c < kOthers; c++) {
      float sum = sum_of(sums[r][c]);
      for (int64_t i = whole; i < width; i++) sum += left.row(r)[i] * load(right[column + c][i]);
      out.row(r)[column + c] = sum;
    }
}

template <int kCount, typename T>
void dot_rows(Rows left, const T *const *right, int64_t columns, int64_t width, Rows out) {
  int64_t column = 0;
  for (; column + kColumns <= columns; column += kColumns)
    dot<kCount, kColumns>(left, right, width, column, out);
  for (; column < columns; column++) dot<kCount, 1>(left, right, width, column, out);
}

// out [count, columns] = left [count, width] right [columns, width]^T
template <typename T>
void multiply_transposed(int64_t count, Rows left, const T *const *right, int64_t columns,
                         int64_t width, Rows out) {
  int64_t row = 0;
  for (; row + kRows <= count; row += kRows)
    dot_rows<kRows>({left.row(row), left.stride}, right, columns, width,
                    {out.row(row), out.stride});
  for (; row < count; row++)
    dot_rows<1>({left.row(row), left.stride}, right, columns, width, {out.row(row), out.stride});
}

// out[r] += the sum of factors[r][j] * right[j], for kCount rows and kVectors vectors from `column` on.
template <int kCount, int kVectors, typename T>
void add(Rows factors, const T *const *right, int64_t inner, int64_t column, Rows out) {
  Lanes sums[kCount][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kCount; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) sums[r][v] = load_lanes(out.row(r) + column + v * kLanes);
  for (int64_t j = 0; j < inner; j++) {
    const T *from = right[j] + column;
    Lanes others[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) others[v] = load_lanes(from + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kCount; r++) {
      const float factor = factors.row(r)[j];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v++) sums[r][v] += factor * others[v];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kCount; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) store_lanes(out.row(r) + column + v * kLanes, sums[r][v]);
}

template <int kCount, int kVectors, typename T>
void add_rows(Rows factors, const T *const *right, int64_t inner, int64_t width, Rows out) {
  int64_t column = 0;
  for (; column + kVectors * kLanes <= width; column += kVectors * kLanes)
    add<kCount, kVectors>(factors, right, inner, column, out);
  for (; column + kLanes <= width; column += kLanes)
    add<kCount, 1>(factors, right, inner, column, out);
  for (; column < width; column++)
    for (int r = 0; r < kCount; r++)
      for (int64_t j = 0; j < inner; j++)
        out.row(r)[column] += factors.row(r)[j] * load(right[j][column]);
}

// out [count, width] += factors [count, inner] right [inner, width]
template <typename T>
void multiply(int64_t count, Rows factors, const T *const *right, int64_t inner, int64_t width,
              Rows out) {
  for (int64_t j = 0; j < inner; j += kInner) {
    const int64_t some = minimum(kInner, inner - j);
    int64_t row = 0;
    for (; row + kRows <= count; row += kRows)
      add_rows<kRows, kColumns>({factors.row(row) + j, factors.stride}, right + j, some, width,
                                {out.row(row), out.stride});
    for (; row < count; row++)
      add_rows<1, kWide>({factors.row(row) + j, factors.stride}, right + j, some, width,
                         {out.row(row), out.stride});
  }
}

inline void clear(float *to, int64_t count) {
  memset(to, 0, static_cast<size_t>(count) * sizeof(float));
}

// Tokens of a part of a context of this length.
inline int64_t part_tokens(int64_t context) {
  return divide_up(divide_up(context, kMostParts), kPiece) * kPiece;
}

inline int64_t count_parts(int64_t context) { return divide_up(context, part_tokens(context)); }

// Memory of the calling thread, for all layers.
thread_local Buffer query_memory;
thread_local Buffer part_memory;
thread_local Buffer place_memory;

template <typename T>
class Latent {
 public:
  explicit Latent(const tw_latent &a)
      : a_(a), width_(a.latent_width + a.shared_width), state_(a.latent_width + 2) {
    firsts_ = static_cast<int64_t *>(place_memory.reserve((a.sequences + 1) * 8));
    firsts_[0] = 0;
    for (int64_t s = 0; s < a.sequences; s++)
      firsts_[s + 1] = firsts_[s] + count_parts(a.context_lengths[s]);
    queries_ = reserve(query_memory, a.sequences * a.heads * width_);
    parts_ = reserve(part_memory, num_parts() * a.heads * state_);
  }

  int64_t num_parts() const { return firsts_[a_.sequences]; }

  // Makes the queries of a head that latents are multiplied with: [sequences, heads, width_].
  void absorb(int64_t head) const {
    static thread_local Buffer memory[2];
    const int64_t stride = a_.heads * (a_.key_width + a_.shared_width);
    const Rows own{reserve(memory[0], a_.sequences * a_.key_width), a_.key_width};
    const Rows to{queries_ + head * width_, a_.heads * width_};
    for (int64_t s = 0; s < a_.sequences; s++) {
      const T *from = static_cast<const T *>(a_.queries) + s * stride;
      const T *shared = from + a_.heads * a_.key_width + head * a_.shared_width;
      from += head * a_.key_width;
#pragma omp simd
      for (int64_t i = 0; i < a_.key_width; i++) own.row(s)[i] = load(from[i]) * a_.scale;
      clear(to.row(s), a_.latent_width);
#pragma omp simd
      for (int64_t i = 0; i < a_.shared_width; i++)
        to.row(s)[a_.latent_width + i] = load(shared[i]) * a_.scale;
    }
    const T *const *keys = rows_of(a_.keys, head, a_.key_width, memory[1]);
    multiply(a_.sequences, own, keys, a_.key_width, a_.latent_width, to);
  }

  // Attends to one part of one context: online softmax (https://arxiv.org/abs/1805.02867) over its
  // pieces. A head's state is its weighted latents, the highest score, and the sum of weights.
  void attend(int64_t part) const {
    static thread_local Buffer memory;
    int64_t s = 0;
    while (firsts_[s + 1] <= part) s++;
    const int64_t context = a_.context_lengths[s], tokens = part_tokens(context);
    const int64_t begin = (part - firsts_[s]) * tokens, end = minimum(begin + tokens, context);
    const int32_t *table = a_.block_tables + s * a_.table_stride;
    const Rows queries{queries_ + s * a_.heads * width_, width_};
    const Rows states{parts_ + part * a_.heads * state_, state_};
    const Rows scores{reserve(memory, a_.heads * kPiece), kPiece};
    for (int64_t h = 0; h < a_.heads; h++) {
      clear(states.row(h), state_);
      states.row(h)[a_.latent_width] = -1e30f;
    }
    for (int64_t first = begin; first < end; first += kPiece) {
      const int64_t count = minimum(kPiece, end - first);
      const T *latents[kPiece];
      for (int64_t t = 0; t < count; t++) {
        const int64_t place = first + t, block = table[place / a_.block_size];
        latents[t] = static_cast<const T *>(a_.pages) +
                     (block * a_.block_size + place % a_.block_size) * a_.page_width;
      }
      multiply_transposed(a_.heads, queries, latents, count, width_, scores);
      for (int64_t h = 0; h < a_.heads; h++) weigh(scores.row(h), count, states.row(h));
      multiply(a_.heads, scores, latents, count, a_.latent_width, states);
    }
  }

  // Merges the parts of all sequences for one head, and writes its outputs.
  void finish(int64_t head) const {
    static thread_local Buffer memory[3];
    const Rows attended{reserve(memory[0], a_.sequences * a_.latent_width), a_.latent_width};
    const Rows outputs{reserve(memory[1], a_.sequences * a_.value_width), a_.value_width};
    for (int64_t s = 0; s < a_.sequences; s++) merge(s, head, attended.row(s));
    const T *const *values = rows_of(a_.values, head, a_.value_width, memory[2]);
    multiply_transposed(a_.sequences, attended, values, a_.value_width, a_.latent_width, outputs);
    for (int64_t s = 0; s < a_.sequences; s++) {
      T *to = static_cast<T *>(a_.out) + (s * a_.heads + head) * a_.value_width;
#pragma omp simd
      for (int64_t i = 0; i < a_.value_width; i++) store(to + i, outputs.row(s)[i]);
    }
  }

 private:
  static float *reserve(Buffer &memory, int64_t count) {
    return static_cast<float *>(memory.reserve(count * static_cast<int64_t>(sizeof(float))));
  }

  // Returns the rows [count, latent_width] of a head's weights.
  const T *const *rows_of(const void *weights, int64_t head, int64_t count, Buffer &memory) const {
    auto **rows = static_cast<const T **>(
        memory.reserve(count * static_cast<int64_t>(sizeof(const T *))));
    const T *first = static_cast<const T *>(weights) + head * count * a_.latent_width;
    for (int64_t i = 0; i < count; i++) rows[i] = first + i * a_.latent_width;
    return rows;
  }

  // Turns a head's scores into weights, and rescales its state to the highest score so far.
  void weigh(float *scores, int64_t count, float *state) const {
    float *numbers = state + a_.latent_width;
    float highest = numbers[0], total = 0;
    for (int64_t t = 0; t < count; t++) highest = maximum(highest, scores[t]);
    const float correction = exponential(numbers[0] - highest);
#pragma omp simd reduction(+ : total)
    for (int64_t t = 0; t < count; t++) {
      scores[t] = exponential(scores[t] - highest);
      total += scores[t];
    }
    numbers[0] = highest;
    numbers[1] = numbers[1] * correction + total;
    if (correction == 1) return;
#pragma omp simd
    for (int64_t i = 0; i < a_.latent_width; i++) state[i] *= correction;
  }

  void merge(int64_t sequence, int64_t head, float *to) const {
    float highest = -1e30f, total = 0;
    const Rows states{parts_ + head * state_, a_.heads * state_};
    for (int64_t part = firsts_[sequence]; part < firsts_[sequence + 1]; part++)
      highest = maximum(highest, states.row(part)[a_.latent_width]);
    clear(to, a_.latent_width);
    for (int64_t part = firsts_[sequence]; part < firsts_[sequence + 1]; part++) {
      const float *state = states.row(part), *numbers = state + a_.latent_width;
      const float factor = exponential(numbers[0] - highest);
      total += numbers[1] * factor;
#pragma omp simd
      for (int64_t i = 0; i < a_.latent_width; i++) to[i] += state[i] * factor;
    }
    const float inverse = 1.0f / total;
#pragma omp simd
    for (int64_t i = 0; i < a_.latent_width; i++) to[i] *= inverse;
  }

  const tw_latent &a_;
  const int64_t width_, state_;
  int64_t *firsts_;  // [sequences + 1], first part of each
  float *queries_;   // [sequences, heads, width_]
  float *parts_;     // [parts, heads, state_]
};

// Writes the latents of all tokens.
template <typename T>
void write(const tw_latent &a) {
  const int64_t width = a.latent_width + a.shared_width;
  for (int64_t token = 0; token < a.tokens; token++)
    memcpy(static_cast<T *>(a.pages) + a.slots[token] * a.page_width,
           static_cast<const T *>(a.latents) + token * width,
           static_cast<size_t>(width) * sizeof(T));
}

template <typename T>
void attend(const tw_latent &a) {
  const Latent<T> kernel(a);
  // Nanoseconds, about: a core multiplies 16 numbers in one.
  const int64_t each = a.heads * a.latent_width * a.sequences / 16;
  parallel_for(a.heads, each * a.key_width, [&](int64_t head) { kernel.absorb(head); });
  int64_t tokens = 0;
  for (int64_t s = 0; s < a.sequences; s++) tokens += a.context_lengths[s];
  parallel_for(kernel.num_parts(), 2 * a.heads * a.latent_width * tokens / 16,
               [&](int64_t part) { kernel.attend(part); });
  parallel_for(a.heads, each * a.value_width, [&](int64_t head) { kernel.finish(head); });
}

// Returns how many sequences from `first` on fit the memory, at least one.
int64_t count_together(const tw_latent &a, int64_t first) {
  int64_t last = first, numbers = 0;
  for (; last < a.sequences; last++) {
    const int64_t states = count_parts(a.context_lengths[last]) * (a.latent_width + 2);
    numbers += a.heads * (a.latent_width + a.shared_width + states);
    if (last > first && numbers > kMostNumbers) break;
  }
  return last - first;
}

template <typename T>
void run(const tw_latent &a) {
  if (a.latents) write<T>(a);
  for (int64_t first = 0; first < a.sequences;) {
    tw_latent some = a;
    some.sequences = count_together(a, first);
    some.queries =
        static_cast<const T *>(a.queries) + first * a.heads * (a.key_width + a.shared_width);
    some.out = static_cast<T *>(a.out) + first * a.heads * a.value_width;
    some.context_lengths += first;
    some.block_tables += first * a.table_stride;
    attend<T>(some);
    first += some.sequences;
  }
}

}  // namespace

void TW_LATENT(const tw_latent *latent) {
  (latent->dtype == TW_FLOAT32 ? run<float> : run<bfloat16>)(*latent);
}
