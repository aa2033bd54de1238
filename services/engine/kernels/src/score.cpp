// Log-probabilities of tokens. TW_SCORE is the name of the function that this compilation defines.
#include "buffer.h"
#include "candidates.h"
#include "draw.h"
#include "threads.h"

namespace {

thread_local Buffer candidate_buffer;

class Row {
 public:
  Row(const tw_score &score, int64_t vocabulary) : logits_(score.logits), vocabulary_(vocabulary) {
    for (float &largest : largest_) largest = -__builtin_inff();
    for_chunks(vocabulary_, [this](int64_t first, int64_t count) {
      const float *items = logits_ + first;
#pragma omp simd
      for (int64_t i = 0; i < count; i++) largest_[i] = maximum(largest_[i], items[i]);
    });
    float highest = -__builtin_inff();
    for (float largest : largest_) highest = maximum(highest, largest);
    double total = 0;
    for_chunks(vocabulary_, [=, &total](int64_t first, int64_t count) {
      const float *items = logits_ + first;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < count; i++) sum += exponential(items[i] - highest);
      total += sum;
    });
    // The largest logit adds 1 to the total. log itself needs glibc 2.29.
    normaliser_ = highest + __builtin_log1p(total - 1);
  }

  float logprob(float logit) const { return static_cast<float>(logit - normaliser_); }

  int64_t rank(float logit) const {
    int64_t above = 0;
    for_chunks(vocabulary_, [=, &above](int64_t first, int64_t count) {
      const float *items = logits_ + first;
      int32_t found = 0;
#pragma omp simd reduction(+ : found)
      for (int64_t i = 0; i < count; i++) found += items[i] > logit;
      above += found;
    });
    return above + 1;
  }

  // Lists the most likely `width` tokens (at most `vocabulary`) in order.
  void list(int64_t width, int64_t *ids, float *logprobs) const {
    auto items = static_cast<Candidate *>(
        candidate_buffer.reserve(vocabulary_ * static_cast<int64_t>(sizeof(Candidate))));
    int64_t count = find_candidates(width, items);
    count = take(items, count, static_cast<double>(width) - 0.5, one);
    order(items, count);
    for (int64_t i = 0; i < width; i++) {
      ids[i] = i < count ? items[i].id : i;  // too few if logits are NaN
      logprobs[i] = i < count ? logprob(items[i].logit) : __builtin_nanf("");
    }
  }

 private:
  // Finds a superset of the most likely `width` tokens.
  int64_t find_candidates(int64_t width, Candidate *to) const {
    const float least = nth_largest(largest_, kGroups, width);
    int64_t count = 0;
    for_blocks_with(logits_, vocabulary_, least, [&](int64_t i) {
      to[count] = {logits_[i], 0, static_cast<int32_t>(i)};
      count += logits_[i] >= least;
    });
    return count;
  }

  const float *const logits_;
  const int64_t vocabulary_;
  double normaliser_ = 0;
  alignas(64) float largest_[kGroups];
};

}  // namespace

void TW_SCORE(tw_score *scores, int64_t count, int64_t vocabulary, int64_t width) {
  parallel_for(count, [=](int64_t i) {
    tw_score &score = scores[i];
    Row row(score, vocabulary);
    float logit = score.logits[score.id];
    score.logprob = row.logprob(logit);
    score.rank = row.rank(logit);
    if (width) row.list(width, score.top_ids, score.top_logprobs);
  });
}
