// Drawing of tokens from logits. TW_DRAW is the name of the function that this compilation defines.
//
// Limits need no sorting: repeated partitioning of the candidates finds where a limit lies.
#include "draw.h"

#include "buffer.h"
#include "candidates.h"
#include "threads.h"

namespace {

constexpr float kLowestTemperature = 1e-30f;  // lowest temperature: only the largest logit is drawn
constexpr float kLeastExponent = -87.0f;  // at and below this exponent, e^x counts as 0

thread_local Buffer weight_buffer, candidate_buffer;

class Row {
 public:
  Row(const tw_draw &draw, int64_t vocabulary)
      : draw_(draw),
        vocabulary_(vocabulary),
        weights_(static_cast<float *>(weight_buffer.reserve((vocabulary + chunks(vocabulary)) * 4))),
        sums_(weights_ + vocabulary) {
    weigh();
  }

  int64_t drawn() const {
    bool is_limited = draw_.top_k > 0 || draw_.top_p < 1 || draw_.min_p > 0;
    return is_limited ? draw_restricted() : draw_plain();
  }

 private:
  static int64_t chunks(int64_t vocabulary) { return (vocabulary + kGroups - 1) / kGroups; }

  bool limits_count() const { return draw_.top_k > 0 && draw_.top_k < vocabulary_; }

  // Computes weights relative to the largest, their sum in each chunk and the maximum of each
  // group.
  void weigh() {
    const float *logits = draw_.logits;
    float highest = -__builtin_inff();
#pragma omp simd reduction(max : highest)
    for (int64_t i = 0; i < vocabulary_; i++) highest = maximum(highest, logits[i]);
    const float scale = 1.0f / maximum(static_cast<float>(draw_.temperature), kLowestTemperature);
    for (float &largest : largest_) largest = 0;
    for_chunks(vocabulary_, [=](int64_t first, int64_t count) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < count; i++) {
        float exponent = (logits[first + i] - highest) * scale;
        float weight = exponent > kLeastExponent ? exponential(exponent) : 0;  // 0 for NaN too
        weights_[first + i] = weight;
        largest_[i] = maximum(largest_[i], weight);
        sum += weight;
      }
      sums_[first / kGroups] = sum;
      total_ += sum;
    });
  }

  int64_t draw_plain() const {
    const double target = draw_.noise * total_;
    double before = 0;
    int64_t drawn = 0;  // if rounding leaves none above the target, the last with a weight
    for (int64_t chunk = 0, first = 0; first < vocabulary_; chunk++, first += kGroups) {
      if (sums_[chunk] == 0) continue;
      const int64_t end = minimum(first + kGroups, vocabulary_);
      if (before + sums_[chunk] <= target) {
        before += sums_[chunk];
        drawn = end - 1;
        continue;
      }
      for (int64_t i = first; i < end && before <= target; i++) {
        if (weights_[i] > 0) drawn = i;
        before += weights_[i];
      }
      return drawn;
    }
    while (drawn > 0 && weights_[drawn] == 0) drawn--;
    return drawn;
  }

  int64_t draw_restricted() const {
    auto items = static_cast<Candidate *>(
        candidate_buffer.reserve(vocabulary_ * static_cast<int64_t>(sizeof(Candidate))));
    int64_t count = find_candidates(items);
    if (count == 0) return 0;  // all logits are NaN
    double total = total_;
    if (limits_count()) {
      count = take(items, count, static_cast<double>(draw_.top_k) - 0.5, one);
      total = sum(items, count);
    }
    if (draw_.top_p < 1) count = take(items, count, draw_.top_p * total, weight_of);
    if (draw_.min_p > 0) count = keep_from(static_cast<float>(draw_.min_p), items, count);
    return items[take(items, count, draw_.noise * sum(items, count), weight_of) - 1].id;
  }

  // Finds a superset of the tokens that the limits leave.
  int64_t find_candidates(Candidate *to) const {
    const float least = least_weight();
    int64_t count = 0;
    for_blocks_with(weights_, vocabulary_, least, [&](int64_t i) {
      to[count] = {draw_.logits[i], weights_[i], static_cast<int32_t>(i)};
      count += weights_[i] >= least;
    });
    return count;
  }

  // Returns a weight below which the limits leave no token. With top_k no other limit is
  // considered, because top_p is a share of all that top_k leaves.
  float least_weight() const {
    float least = __FLT_MIN__;
    // If top_k groups have a maximum of at least x, then top_k tokens have a weight of at least x.
    if (limits_count()) return maximum(least, nth_largest(largest_, kGroups, draw_.top_k));
    if (draw_.top_p < 1) least = maximum(least, least_of_share());
    return maximum(least, static_cast<float>(0.999 * draw_.min_p));
  }

  // Returns a weight such that all lighter tokens together weigh no more than what top_p leaves
  // out.
  float least_of_share() const {
    const double left_out = 0.999 * (1 - draw_.top_p) * total_;
    // The first holds for any weights, since even `vocabulary` such tokens weigh no more. The
    // others are tried.
    constexpr int kTries = 8;
    float tries[kTries];
    double below[kTries] = {};
    tries[0] = static_cast<float>(left_out / static_cast<double>(vocabulary_));
    const float step = __builtin_powf(tries[0], -1.0f / kTries);
    for (int i = 1; i < kTries; i++) tries[i] = tries[i - 1] * step;
    for_chunks(vocabulary_, [&](int64_t first, int64_t count) {
      const float *items = weights_ + first;
      for (int t = 1; t < kTries; t++) {
        const float least = tries[t];
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < count; i++) sum += items[i] < least ? items[i] : 0;
        below[t] += sum;
      }
    });
    int best = 0;
    while (best + 1 < kTries && below[best + 1] <= left_out) best++;
    return tries[best];
  }

  // Moves candidates that weigh at least `least` to the front and returns their number, at least
  // one.
  static int64_t keep_from(float least, Candidate *items, int64_t count) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++)
      if (items[i].weight >= least) swap(items[kept++], items[i]);
    return maximum(kept, int64_t{1});
  }

  const tw_draw &draw_;
  const int64_t vocabulary_;
  float *const weights_;
  float *const sums_;
  double total_ = 0;
  alignas(64) float largest_[kGroups];
};

}  // namespace

void TW_DRAW(tw_draw *draws, int64_t count, int64_t vocabulary) {
  parallel_for(count, [=](int64_t i) { draws[i].drawn = Row(draws[i], vocabulary).drawn(); });
}
