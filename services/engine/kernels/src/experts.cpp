// Choice of experts and the sum of their outputs. TW_EXPERTS is the name of the table that this
// compilation defines.
#include "experts.h"

#include <string.h>

#include "buffer.h"
#include "exponential.h"
#include "scalars.h"
#include "threads.h"

namespace {

constexpr int64_t kRows = 8;        // of a loop's item
constexpr int64_t kColumns = 1024;  // of a loop's item
constexpr int64_t kAtOnce = 256;    // columns whose sums stay in the L1 cache

constexpr int32_t kTaken = INT32_MIN;         // key of an expert that is chosen already
constexpr int32_t kLeftOut = INT32_MIN + 1;  // key of an expert of no kept group

// Returns a number in the order of the floats. All NaNs are the largest.
inline int32_t key_of(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return value != value ? INT32_MAX : bits ^ (bits >> 31 & INT32_MAX);
}

// Returns the first of the largest keys, and takes it.
inline int64_t take_best(int32_t *keys, int64_t count) {
  int32_t best = INT32_MIN;
#pragma omp simd reduction(max : best)
  for (int64_t i = 0; i < count; i++) best = keys[i] > best ? keys[i] : best;
  int64_t first = 0;
  while (keys[first] != best) first++;
  keys[first] = kTaken;
  return first;
}

// A NaN remains one, though `exponential` has none.
inline float power_of(float x) { return x != x ? x : exponential(x); }

void weigh(const tw_routing &routing, const float *scores, float *weights) {
  const int64_t count = routing.experts;
  if (routing.has_sigmoids) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) weights[i] = 1.0f / (1.0f + power_of(-scores[i]));
    return;
  }
  float most = -__builtin_inff(), total = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < count; i++) most = scores[i] > most ? scores[i] : most;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; i++) total += weights[i] = power_of(scores[i] - most);
#pragma omp simd
  for (int64_t i = 0; i < count; i++) weights[i] /= total;
}

// The choice of one thread's rows.
class Chooser {
 public:
  explicit Chooser(const tw_routing &routing) : routing_(routing) {
    static thread_local Buffer memory;
    const int64_t count = routing.experts;
    weights_ = static_cast<float *>(memory.reserve(4 * count * 4));
    ranks_ = weights_ + count;
    keys_ = reinterpret_cast<int32_t *>(ranks_ + count);
    group_keys_ = keys_ + count;
  }

  void choose(const float *scores, int64_t *chosen, float *factors) {
    routing_.is_sparse ? choose_sparsely(scores, chosen, factors)
                       : choose_best(scores, chosen, factors);
    if (!routing_.factors) return;
    for (int64_t k = 0; k < routing_.per_row; k++) factors[k] *= routing_.factors[chosen[k]];
  }

 private:
  void choose_best(const float *scores, int64_t *chosen, float *factors) {
    weigh(routing_, scores, weights_);
    const float *bias = routing_.bias;
    const bool has_groups = routing_.kept_groups < routing_.groups;
    // Equal weights may have rounded away which score is higher.
    const float *const ranked = bias || has_groups ? weights_ : scores;
    for (int64_t i = 0; i < routing_.experts; i++) ranks_[i] = ranked[i] + (bias ? bias[i] : 0.0f);
    for (int64_t i = 0; i < routing_.experts; i++) keys_[i] = key_of(ranks_[i]);
    if (has_groups) keep_groups();
    float sum = 0;
    for (int64_t k = 0; k < routing_.per_row; k++) {
      chosen[k] = take_best(keys_, routing_.experts);
      factors[k] = weights_[chosen[k]];
      sum += factors[k];
    }
    const float divisor = !routing_.is_normalized ? 1.0f
                          : sum < routing_.least_sum ? routing_.least_sum
                                                     : sum;
    for (int64_t k = 0; k < routing_.per_row; k++) factors[k] = factors[k] / divisor * routing_.scale;
  }

  // Weighs the best expert against those close to it, then the next one without the best.
  void choose_sparsely(const float *scores, int64_t *chosen, float *factors) {
    for (int64_t i = 0; i < routing_.experts; i++) keys_[i] = key_of(scores[i]);
    for (int64_t k = 0; k < routing_.per_row; k++) {
      chosen[k] = take_best(keys_, routing_.experts);
      const float best = scores[chosen[k]];
      float total = best != best ? best : 1.0f;
      for (int64_t i = 0; i < routing_.experts; i++) {
        const float size = __builtin_fabsf(scores[i]), most = size > best ? size : best;
        const bool is_far = (best - scores[i]) / most > 2 * routing_.jitter;
        if (keys_[i] != kTaken && !is_far) total += power_of(scores[i] - best);
      }
      factors[k] = 1.0f / total;
    }
  }

  // Leaves out the experts of all groups but the best. A group is as good as its leaders together.
  void keep_groups() {
    const int64_t size = routing_.experts / routing_.groups;
    for (int64_t g = 0; g < routing_.groups; g++) {
      int32_t *keys = keys_ + g * size;
      float sum = 0;
      for (int64_t k = 0; k < routing_.group_leaders; k++)
        sum += ranks_[g * size + take_best(keys, size)];
      group_keys_[g] = key_of(sum);
    }
    for (int64_t i = 0; i < routing_.experts; i++) keys_[i] = kLeftOut;
    for (int64_t k = 0; k < routing_.kept_groups; k++) {
      const int64_t first = take_best(group_keys_, routing_.groups) * size;
      for (int64_t i = first; i < first + size; i++) keys_[i] = key_of(ranks_[i]);
    }
  }

  const tw_routing &routing_;
  float *weights_, *ranks_;
  int32_t *keys_, *group_keys_;
};

void choose(const tw_routing *routing, const float *scores, int64_t num_rows, int64_t *chosen,
            float *weights) {
  parallel_for((num_rows + kRows - 1) / kRows, [=](int64_t item) {
    Chooser chooser(*routing);
    const int64_t end = minimum((item + 1) * kRows, num_rows);
    for (int64_t row = item * kRows; row < end; row++)
      chooser.choose(scores + row * routing->experts, chosen + row * routing->per_row,
                     weights + row * routing->per_row);
  });
}

template <typename T, typename Out>
void add_outputs(const Combination &c, int64_t row, int64_t begin, int64_t count) {
  float sums[kAtOnce] = {};
  for (int64_t k = row * c.per_row; k < (row + 1) * c.per_row; k++) {
    const T *from = static_cast<const T *>(c.outputs) + c.positions[k] * c.width + begin;
    const float factor = c.factors[k];
#pragma omp simd
    for (int64_t i = 0; i < count; i++) sums[i] += factor * load(from[i]);
  }
  Out *to = static_cast<Out *>(c.out) + row * c.width + begin;
#pragma omp simd
  for (int64_t i = 0; i < count; i++) store(to + i, load(to[i]) + sums[i]);
}

template <typename T, typename Out>
void combine(const Combination &c) {
  const int64_t parts = (c.width + kColumns - 1) / kColumns;
  parallel_for(c.num_rows * parts, [=](int64_t item) {
    const int64_t first = item % parts * kColumns, end = minimum(first + kColumns, c.width);
    for (int64_t begin = first; begin < end; begin += kAtOnce)
      add_outputs<T, Out>(c, item / parts, begin, minimum(kAtOnce, end - begin));
  });
}

template <typename T>
void combine_into(const Combination &c) {
  (c.out_dtype == TW_FLOAT32 ? combine<T, float> : combine<T, bfloat16>)(c);
}

}  // namespace

const ExpertKernels TW_EXPERTS = {
    choose,
    [](const Combination &c) {
      (c.dtype == TW_FLOAT32 ? combine_into<float> : combine_into<bfloat16>)(c);
    },
};
