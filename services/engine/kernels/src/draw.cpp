// Draws tokens from logits. TW_DRAW names what this compilation defines.
//
// Nothing is sorted: what a limit leaves is found by splitting candidates around one of them, again
// and again, where the limit lies.
#include "draw.h"

#include "buffer.h"
#include "exponential.h"
#include "threads.h"

namespace {

constexpr int64_t kGroup = 64;      // weights summed at once
constexpr float kColdest = 1e-30f;  // of two logits that differ, only the larger is drawn then
constexpr float kNothing = -87.0f;  // e to the power of this is taken as 0

struct Candidate {
  float logit;
  float weight;
  int32_t id;
};

thread_local Buffer weight_buffer, group_buffer, candidate_buffer;

// Without a branch: which it is can't be foreseen.
bool precedes(const Candidate &a, const Candidate &b) {
  return (a.logit > b.logit) | ((a.logit == b.logit) & (a.id < b.id));
}

template <typename T>
void swap(T &a, T &b) {
  T held = a;
  a = b;
  b = held;
}

double weight_of(const Candidate &candidate) { return candidate.weight; }
double one(const Candidate &) { return 1; }

// Moves what precedes one of the candidates to its front; where that one then is.
int64_t split(Candidate *some, int64_t count) {
  Candidate &first = some[0], &middle = some[count / 2], &last = some[count - 1];
  if (precedes(middle, first)) swap(middle, first);
  if (precedes(last, first)) swap(last, first);
  if (precedes(middle, last)) swap(middle, last);  // the median is last
  const Candidate median = last;
  int64_t place = 0;
  for (int64_t i = 0; i < count - 1; i++) {
    bool is_in_front = precedes(some[i], median);
    swap(some[place], some[i]);
    place += is_in_front;
  }
  swap(some[place], last);
  return place;
}

// How many candidates it takes, in their order, until their measures add up to more than `target`,
// or all. They are moved to the front; the last of them is the one that passes the target.
template <typename Measure>
int64_t take(Candidate *some, int64_t count, double target, const Measure &measure) {
  int64_t first = 0, end = count;
  double before = 0;
  while (end - first > 1) {
    int64_t place = first + split(some + first, end - first);
    double front = 0;
    for (int64_t i = first; i < place; i++) front += measure(some[i]);
    if (before + front > target) {
      end = place;
      continue;
    }
    before += front + measure(some[place]);
    if (before > target || place + 1 == end) return place + 1;
    first = place + 1;
  }
  return end;
}

double sum(const Candidate *some, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += some[i].weight;
  return total;
}

class Row {
 public:
  Row(const tw_draw &draw, int64_t vocabulary)
      : draw_(draw),
        vocabulary_(vocabulary),
        groups_((vocabulary + kGroup - 1) / kGroup),
        weights_(static_cast<float *>(weight_buffer.reserve(vocabulary * 4))),
        sums_(static_cast<float *>(group_buffer.reserve(3 * groups_ * 4))),
        largest_(sums_ + groups_) {
    weigh();
  }

  int64_t drawn() const {
    bool is_limited = draw_.top_k > 0 || draw_.top_p < 1 || draw_.min_p > 0;
    return is_limited ? draw_restricted() : draw_plain();
  }

 private:
  bool limits_count() const { return draw_.top_k > 0 && draw_.top_k < vocabulary_; }

  int64_t end_of(int64_t group) const { return minimum((group + 1) * kGroup, vocabulary_); }

  // Weights relative to the largest, their sums and the largest of each group.
  void weigh() {
    const float *logits = draw_.logits;
    float highest = -__builtin_inff();
#pragma omp simd reduction(max : highest)
    for (int64_t i = 0; i < vocabulary_; i++) highest = maximum(highest, logits[i]);
    const float scale = 1.0f / maximum(static_cast<float>(draw_.temperature), kColdest);
    for (int64_t group = 0; group < groups_; group++) {
      float total = 0, most = 0;
#pragma omp simd reduction(+ : total) reduction(max : most)
      for (int64_t i = group * kGroup; i < end_of(group); i++) {
        float exponent = (logits[i] - highest) * scale;
        float weight = exponent > kNothing ? exponential(exponent) : 0;  // of a NaN 0 too
        weights_[i] = weight;
        total += weight;
        most = maximum(most, weight);
      }
      sums_[group] = total;
      largest_[group] = most;
      total_ += total;
    }
  }

  int64_t draw_plain() const {
    const double target = draw_.noise * total_;
    double before = 0;
    int64_t last = 0;  // what is drawn where rounding leaves nothing above the target
    for (int64_t group = 0; group < groups_; group++) {
      if (!sums_[group]) continue;
      if (before + sums_[group] <= target) {
        before += sums_[group];
        last = end_of(group) - 1;
        continue;
      }
      for (int64_t i = group * kGroup; i < end_of(group); i++) {
        if (weights_[i]) last = i;
        before += weights_[i];
        if (before > target) break;
      }
      return last;
    }
    while (last > 0 && !weights_[last]) last--;
    return last;
  }

  int64_t draw_restricted() const {
    auto some = static_cast<Candidate *>(
        candidate_buffer.reserve(vocabulary_ * static_cast<int64_t>(sizeof(Candidate))));
    int64_t count = find_candidates(some);
    if (count == 0) return 0;  // nothing but NaN
    double total = total_;
    if (limits_count()) {
      count = take(some, count, static_cast<double>(draw_.top_k) - 0.5, one);
      total = sum(some, count);
    }
    if (draw_.top_p < 1) count = take(some, count, draw_.top_p * total, weight_of);
    if (draw_.min_p > 0) count = keep_from(static_cast<float>(draw_.min_p), some, count);
    return some[take(some, count, draw_.noise * sum(some, count), weight_of) - 1].id;
  }

  // All tokens that may be left by the limits, in the order of ids.
  int64_t find_candidates(Candidate *to) const {
    const float least = least_weight();
    int64_t count = 0;
    for (int64_t group = 0; group < groups_; group++) {
      if (largest_[group] < least) continue;
      for (int64_t i = group * kGroup; i < end_of(group); i++)
        if (weights_[i] >= least)
          to[count++] = {draw_.logits[i], weights_[i], static_cast<int32_t>(i)};
    }
    return count;
  }

  // What weighs less than this is left by none of the limits. top_p is a share of what top_k leaves,
  // which then has to be complete.
  float least_weight() const {
    if (limits_count()) return maximum(__FLT_MIN__, least_of_top());
    // Not even all of the others together weigh what top_p leaves out.
    double others = (1 - draw_.top_p) * total_ / static_cast<double>(vocabulary_);
    double least = 0.999 * (others > draw_.min_p ? others : draw_.min_p);
    return maximum(__FLT_MIN__, static_cast<float>(least));
  }

  // A weight that at least top_k tokens have: that many groups have one, if there are so many.
  float least_of_top() const {
    if (draw_.top_k > groups_) return 0;
    float *some = largest_ + groups_;
    for (int64_t group = 0; group < groups_; group++) some[group] = largest_[group];
    int64_t first = 0, end = groups_, wanted = draw_.top_k - 1;
    while (end - first > 1) {
      swap(some[first + (end - first) / 2], some[end - 1]);
      int64_t place = first;
      for (int64_t i = first; i < end - 1; i++)
        if (some[i] > some[end - 1]) swap(some[place++], some[i]);
      swap(some[place], some[end - 1]);
      if (place == wanted) return some[place];
      (place > wanted ? end : first) = place > wanted ? place : place + 1;
    }
    return some[wanted];
  }

  // Moves those that weigh at least so much to the front; how many they are, at least one.
  static int64_t keep_from(float least, Candidate *some, int64_t count) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++)
      if (some[i].weight >= least) swap(some[kept++], some[i]);
    return maximum(kept, int64_t{1});
  }

  const tw_draw &draw_;
  const int64_t vocabulary_, groups_;
  float *const weights_;
  float *const sums_, *const largest_;
  double total_ = 0;
};

}  // namespace

void TW_DRAW(tw_draw *draws, int64_t count, int64_t vocabulary) {
  parallel_for(count, [=](int64_t i) { draws[i].drawn = Row(draws[i], vocabulary).drawn(); });
}
