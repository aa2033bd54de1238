// Selective scan of Mamba (https://arxiv.org/abs/2312.00752), compiled once per instruction set.
//
// TW_SELECTIVE(stage) is the name of the function that this compilation defines for a stage.
// Everything else is in an anonymous namespace, and no standard template is instantiated (see
// portable.cpp).
#include "selective_scan.h"

#include <string.h>

#include "buffer.h"
#include "chains.h"
#include "convolution.h"
#include "denormals.h"
#include "exponential.h"
#include "scalars.h"
#include "threads.h"

namespace {

constexpr int64_t kChannels = 64;  // channels that a thread scans together

thread_local Buffer memory;
thread_local Buffer firsts;

// Copies rows of `width` numbers, rounded to what `to` holds; from: null for zeros.
template <typename From, typename To>
void copy_rows(const From *from, int64_t from_stride, To *to, int64_t to_stride, int64_t rows,
               int64_t width) {
  for (int64_t n = 0; n < rows; n++) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++)
      store(to + n * to_stride + i, from ? load(from[n * from_stride + i]) : 0.0f);
  }
}

// Scans channels `first` to `first` + `width` - 1 over runs `begin` to `end` - 1.
template <typename T, typename State>
void scan_channels(const tw_selective &s, int64_t first, int64_t width, int64_t begin,
                   int64_t end) {
  const int64_t channels = s.channels, states = s.state_width;
  auto state = static_cast<float *>(memory.reserve((2 * states + 4) * kChannels * 4));
  float *rates = state + states * kChannels, *step = rates + states * kChannels;
  float *x = step + kChannels, *taken = x + kChannels, *out = taken + kChannels;
  copy_rows(s.rates + first, channels, rates, kChannels, states, width);
  auto slot_state = [&](int64_t slot) {
    return static_cast<State *>(s.states) + slot * states * channels + first;
  };
  for (int64_t run = begin; run < end; run++) {
    const State *source = s.sources[run] < 0 ? nullptr : slot_state(s.sources[run]);
    copy_rows(source, channels, state, kChannels, states, width);
    for (int64_t token = s.starts[run]; token < s.starts[run + 1]; token++) {
      const T *steps = static_cast<const T *>(s.steps) + token * channels + first;
      const T *inputs = static_cast<const T *>(s.convolved) + token * channels + first;
      const T *gate = static_cast<const T *>(s.gate) + token * s.gate_stride + first;
      T *to = static_cast<T *>(s.out) + token * channels + first;
      const float *opened = s.opened + token * states, *closed = s.closed + token * states;
#pragma omp simd
      for (int64_t i = 0; i < width; i++) {
        step[i] = softplus(load(steps[i]) + s.step_bias[first + i]);
        x[i] = load(inputs[i]);
        taken[i] = step[i] * x[i];
        out[i] = s.skip[first + i] * x[i];
      }
      for (int64_t n = 0; n < states; n++) {
        const float factor = opened[n], read = closed[n], *rate = rates + n * kChannels;
        float *row = state + n * kChannels;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
          row[i] = exponential(-rate[i] * step[i]) * row[i] + factor * taken[i];
          out[i] += read * row[i];
        }
      }
#pragma omp simd
      for (int64_t i = 0; i < width; i++) store(to + i, out[i] * silu(load(gate[i])));
    }
    copy_rows(state, kChannels, slot_state(s.targets[run]), channels, states, width);
  }
}

template <typename T>
void convolve_all(const tw_selective &s) {
  auto first = static_cast<int64_t *>(firsts.reserve((s.runs + 1) * 8));
  const int64_t chains = find_chains(s.sources, s.targets, s.runs, first);
  const int64_t parts = (s.channels + kConvolved - 1) / kConvolved;
  parallel_for(chains * parts, convolution_work(s, s.channels), [&](int64_t item) {
    const int64_t chain = item / parts, at = item % parts * kConvolved;
    convolve<T>(s, memory, s.channels, static_cast<T *>(s.convolved), at,
                minimum(at + kConvolved, s.channels), first[chain], first[chain + 1]);
  });
}

template <typename T>
void scan_all(const tw_selective &s) {
  // A chain of runs is computed by one thread.
  auto first = static_cast<int64_t *>(firsts.reserve((s.runs + 1) * 8));
  const int64_t chains = find_chains(s.sources, s.targets, s.runs, first);
  const int64_t parts = (s.channels + kChannels - 1) / kChannels;
  const int64_t work = s.starts[s.runs] * s.channels * s.state_width;
  parallel_for(chains * parts, work, [&](int64_t item) {
    [[maybe_unused]] const DenormalsAreZero rounding;
    const int64_t chain = item / parts, at = item % parts * kChannels;
    const int64_t width = minimum(kChannels, s.channels - at);
    s.state_dtype == TW_FLOAT32
        ? scan_channels<T, float>(s, at, width, first[chain], first[chain + 1])
        : scan_channels<T, bfloat16>(s, at, width, first[chain], first[chain + 1]);
  });
}

}  // namespace

void TW_SELECTIVE(convolve)(const tw_selective *scan) {
  scan->dtype == TW_FLOAT32 ? convolve_all<float>(*scan) : convolve_all<bfloat16>(*scan);
}

void TW_SELECTIVE(scan)(const tw_selective *scan) {
  scan->dtype == TW_FLOAT32 ? scan_all<float>(*scan) : scan_all<bfloat16>(*scan);
}
