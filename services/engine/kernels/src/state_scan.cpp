// State space scan of Mamba-2 (https://arxiv.org/abs/2405.21060), compiled once per instruction
// set.
//
// TW_SCAN is the name of the function that this compilation defines. Everything else is in an
// anonymous namespace, and no standard template is instantiated (see portable.cpp).
#include "state_scan.h"

#include <math.h>
#include <string.h>

#include "buffer.h"
#include "chains.h"
#include "convolution.h"
#include "denormals.h"
#include "exponential.h"
#include "scalars.h"
#include "threads.h"

namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

constexpr int64_t kVectors = 4;     // vectors of a state's row that are advanced together

inline Lanes load_lanes(const float *from) {
  Lanes lanes;
  memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

int64_t outputs_of(const tw_scan &s) { return s.heads * s.head_dim; }

int64_t channels_of(const tw_scan &s) { return outputs_of(s) + 2 * s.groups * s.state_width; }

thread_local Buffer memory;

// Makes `to` decay * from + factors x^T, and adds to^T closed to `out`. from: null for zeros, or
// `to` itself; all rows have `width` numbers.
void advance(const float *from, float *to, const float *x, const float *factors,
             const float *closed, float decay, int64_t rows, int64_t width, float *out) {
  int64_t at = 0;
  for (; at + kVectors * kLanes <= width; at += kVectors * kLanes) {
    Lanes input[kVectors], sums[kVectors];
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; v++) {
      input[v] = load_lanes(x + at + v * kLanes);
      sums[v] = load_lanes(out + at + v * kLanes);
    }
    for (int64_t n = 0; n < rows; n++) {
      const float factor = factors[n], read = closed[n];
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; v++) {
        const int64_t place = n * width + at + v * kLanes;
        Lanes row = factor * input[v];
        if (from) row += decay * load_lanes(from + place);
        sums[v] += read * row;
        memcpy(to + place, &row, sizeof row);
      }
    }
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; v++) memcpy(out + at + v * kLanes, &sums[v], sizeof(Lanes));
  }
  if (at == width) return;
  for (int64_t n = 0; n < rows; n++) {
    const float factor = factors[n], read = closed[n];
    float *row = to + n * width;
    const float *before = from ? from + n * width : nullptr;
#pragma omp simd
    for (int64_t i = at; i < width; i++) {
      row[i] = factor * x[i] + (before ? decay * before[i] : 0.0f);
      out[i] += read * row[i];
    }
  }
}

// Computes in float32, in the state itself or in a copy that is rounded behind each run.
template <typename T, typename State>
void scan_head(const tw_scan &s, int64_t head, int64_t begin, int64_t end) {
  constexpr bool kCopies = sizeof(State) < sizeof(float);
  const int64_t channels = channels_of(s), outputs = outputs_of(s), width = s.head_dim;
  const int64_t group = head / (s.heads / s.groups), size = s.state_width * width;
  auto factors =
      static_cast<float *>(memory.reserve((s.state_width + (kCopies ? size : 0)) * 4));
  float *const copy = factors + s.state_width;
  auto state_of = [&](int64_t slot) {
    return static_cast<State *>(s.states) + (slot * s.heads + head) * size;
  };
  for (int64_t run = begin; run < end; run++) {
    const State *source = s.sources[run] < 0 ? nullptr : state_of(s.sources[run]);
    State *const target = state_of(s.targets[run]);
    const float *from = reinterpret_cast<const float *>(source);
    float *const to = kCopies ? copy : reinterpret_cast<float *>(target);
    if (kCopies && source) {
#pragma omp simd
      for (int64_t i = 0; i < size; i++) copy[i] = load(source[i]);
      from = copy;
    }
    for (int64_t token = s.starts[run]; token < s.starts[run + 1]; token++) {
      const T *steps = static_cast<const T *>(s.steps) + token * s.steps_stride;
      const float wanted = load(steps[head]) + s.step_bias[head];
      const float bounded = minimum(
          maximum(wanted > 20.0f ? wanted : log1pf(exponential(wanted)), s.least_step),
          s.most_step);
      const float step = wanted != wanted ? wanted : bounded;  // a NaN remains one
      const float *row = s.convolved + token * channels;
      const float *x = row + head * width, *opened = row + outputs + group * s.state_width;
      const float *closed = opened + s.groups * s.state_width;
      float *out = s.scanned + token * outputs + head * width;
#pragma omp simd
      for (int64_t n = 0; n < s.state_width; n++) factors[n] = step * opened[n];
#pragma omp simd
      for (int64_t i = 0; i < width; i++) out[i] = s.skip[head] * x[i];
      const float decay = exponential(-s.rates[head] * step);
      advance(from, to, x, factors, closed, decay, s.state_width, width, out);
      from = to;
    }
    if (kCopies) {
#pragma omp simd
      for (int64_t i = 0; i < size; i++) store(target + i, copy[i]);
    }
  }
}

// Writes a token's outputs: gated, and normed before or after that.
template <typename T>
void finish(const tw_scan &s, int64_t token) {
  const int64_t outputs = outputs_of(s);
  const T *gate = static_cast<const T *>(s.gate) + token * s.gate_stride;
  T *to = static_cast<T *>(s.out) + token * s.out_stride;
  float *rows = s.scanned + token * outputs;
  const int64_t width = s.norm ? s.norm_width : outputs;
  for (int64_t first = 0; first < outputs; first += width) {
    float squares = 0, scale = 1;
    if (!s.norms_first || !s.norm) {
#pragma omp simd
      for (int64_t i = first; i < first + width; i++) rows[i] *= silu(load(gate[i]));
    }
    if (s.norm) {
#pragma omp simd reduction(+ : squares)
      for (int64_t i = first; i < first + width; i++) squares += rows[i] * rows[i];
      scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + s.epsilon);
#pragma omp simd
      for (int64_t i = first; i < first + width; i++) rows[i] *= scale * s.norm[i];
    }
    if (s.norms_first && s.norm) {
#pragma omp simd
      for (int64_t i = first; i < first + width; i++) rows[i] *= silu(load(gate[i]));
    }
#pragma omp simd
    for (int64_t i = first; i < first + width; i++) store(to + i, rows[i]);
  }
}

thread_local Buffer firsts;

template <typename T>
void run(const tw_scan &s) {
  // A chain of runs is computed by one thread.
  auto first = static_cast<int64_t *>(firsts.reserve((s.runs + 1) * 8));
  const int64_t chains = find_chains(s.sources, s.targets, s.runs, first);
  const int64_t channels = channels_of(s), parts = (channels + kConvolved - 1) / kConvolved;
  parallel_for(chains * parts, convolution_work(s, channels), [&](int64_t item) {
    const int64_t chain = item / parts, at = item % parts * kConvolved;
    convolve<T>(s, memory, channels, s.convolved, at, minimum(at + kConvolved, channels),
                first[chain], first[chain + 1]);
  });
  const int64_t tokens = s.starts[s.runs], outputs = outputs_of(s);
  parallel_for(chains * s.heads, tokens * outputs * s.state_width / 4, [&](int64_t item) {
    [[maybe_unused]] const DenormalsAreZero rounding;
    const int64_t chain = item / s.heads;
    const int64_t head = item % s.heads, begin = first[chain], end = first[chain + 1];
    s.state_dtype == TW_FLOAT32 ? scan_head<T, float>(s, head, begin, end)
                                : scan_head<T, bfloat16>(s, head, begin, end);
  });
  if (s.out) parallel_for(tokens, tokens * outputs, [&](int64_t token) { finish<T>(s, token); });
}

}  // namespace

void TW_SCAN(const tw_scan *scan) {
  scan->dtype == TW_FLOAT32 ? run<float>(*scan) : run<bfloat16>(*scan);
}
