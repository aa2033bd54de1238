// Selection of the most likely tokens without sorting the row.
#pragma once

#include <string.h>

#include <cstdint>

#include "exponential.h"

namespace {

// Token i belongs to group i % kGroups, so that vector lanes find the maximum of each group.
constexpr int64_t kGroups = 512;

// Calls body(first, count) for successive chunks of one token per group.
template <typename Body>
void for_chunks(int64_t vocabulary, const Body &body) {
  int64_t first = 0;
  for (; first + kGroups <= vocabulary; first += kGroups) body(first, kGroups);
  if (first < vocabulary) body(first, vocabulary - first);
}

// Calls body(token) for all tokens of each block in which some value is at least `least`.
template <typename Body>
void for_blocks_with(const float *values, int64_t vocabulary, float least, const Body &body) {
  constexpr int64_t kBlock = 64;
  for (int64_t first = 0; first < vocabulary; first += kBlock) {
    const int64_t end = minimum(first + kBlock, vocabulary);
    float largest = -__builtin_inff();
#pragma omp simd reduction(max : largest)
    for (int64_t i = first; i < end; i++) largest = maximum(largest, values[i]);
    if (largest < least) continue;
    for (int64_t i = first; i < end; i++) body(i);
  }
}

struct Candidate {
  float logit;
  float weight;
  int32_t id;
};

// Branch-free, because the outcome is unpredictable.
inline bool precedes(const Candidate &a, const Candidate &b) {
  return (a.logit > b.logit) | ((a.logit == b.logit) & (a.id < b.id));
}

template <typename T>
void swap(T &a, T &b) {
  T held = a;
  a = b;
  b = held;
}

inline double weight_of(const Candidate &candidate) { return candidate.weight; }
inline double one(const Candidate &) { return 1; }

// Partitions the candidates around one of them and returns its new index.
inline int64_t split(Candidate *items, int64_t count) {
  Candidate &first = items[0], &middle = items[count / 2], &last = items[count - 1];
  if (precedes(middle, first)) swap(middle, first);
  if (precedes(last, first)) swap(last, first);
  if (precedes(middle, last)) swap(middle, last);  // the median is last
  const Candidate median = last;
  int64_t place = 0;
  for (int64_t i = 0; i < count - 1; i++) {
    bool is_in_front = precedes(items[i], median);
    swap(items[place], items[i]);
    place += is_in_front;
  }
  swap(items[place], last);
  return place;
}

// Returns how many candidates, in order, it takes until their measures sum to more than `target`,
// or all. They are moved to the front, last the one that passes the target.
template <typename Measure>
int64_t take(Candidate *items, int64_t count, double target, const Measure &measure) {
  int64_t first = 0, end = count;
  double before = 0;
  while (end - first > 1) {
    int64_t place = first + split(items + first, end - first);
    double front = 0;
    for (int64_t i = first; i < place; i++) front += measure(items[i]);
    if (before + front > target) {
      end = place;
      continue;
    }
    before += front + measure(items[place]);
    if (before > target || place + 1 == end) return place + 1;
    first = place + 1;
  }
  return end;
}

// Sorts candidates.
inline void order(Candidate *items, int64_t count) {
  if (count < 2) return;
  int64_t place = split(items, count);
  order(items, place);
  order(items + place + 1, count - place - 1);
}

inline double sum(const Candidate *items, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += items[i].weight;
  return total;
}

// Returns the nth largest number, or -infinity if there are fewer, by bisection over all floats:
// their bits are in order.
inline float nth_largest(const float *items, int64_t count, int64_t n) {
  auto number = [](int64_t place) {
    int32_t bits = static_cast<int32_t>(place < 0 ? place ^ 0x7fffffff : place);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  };
  constexpr int64_t kInfinity = 0x7f800000;
  int64_t low = -kInfinity - 1, high = kInfinity;
  while (low < high) {
    const int64_t middle = high - (high - low) / 2;
    const float least = number(middle);
    int32_t found = 0;
#pragma omp simd reduction(+ : found)
    for (int64_t i = 0; i < count; i++) found += items[i] >= least;
    if (found >= n)
      low = middle;
    else
      high = middle - 1;
  }
  return number(low);
}

}  // namespace
