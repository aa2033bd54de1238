// Convolution of each channel over the last tokens of a chain of runs, and its SiLU.
#pragma once

#include <string.h>

#include "buffer.h"
#include "exponential.h"
#include "scalars.h"

namespace {

constexpr int64_t kConvolved = 256;  // channels that a thread convolves together

inline float silu(float x) { return x / (1.0f + exponential(-x)); }

// Returns the work of a step's convolution, for parallel_for.
template <typename Scan>
inline int64_t convolution_work(const Scan &s, int64_t channels) {
  return s.starts[s.runs] * channels * s.conv_width / 4;
}

// Convolves channels `first` to `last` - 1 over the tokens of runs `begin` to `end` - 1, from
// `s.mixed` to `to` [tokens, channels]. T: of what is convolved.
template <typename T, typename Scan, typename Out>
void convolve(const Scan &s, Buffer &memory, int64_t channels, Out *to, int64_t first, int64_t last,
              int64_t begin, int64_t end) {
  const int64_t past = s.conv_width - 1, width = last - first;
  auto window = static_cast<float *>(memory.reserve((past + 2) * width * 4));
  float *sums = window + (past + 1) * width;
  auto slot_row = [&](int64_t slot, int64_t row) {
    return static_cast<T *>(s.windows) + (slot * past + row) * channels + first;
  };
  memset(window, 0, static_cast<size_t>(past * width) * 4);
  if (s.sources[begin] >= 0)
    for (int64_t row = 0; row < past; row++) {
      const T *from = slot_row(s.sources[begin], row);
#pragma omp simd
      for (int64_t i = 0; i < width; i++) window[row * width + i] = load(from[i]);
    }
  for (int64_t run = begin; run < end; run++) {
    for (int64_t token = s.starts[run]; token < s.starts[run + 1]; token++) {
      const T *from = static_cast<const T *>(s.mixed) + token * s.mixed_stride + first;
      float *newest = window + past * width;
#pragma omp simd
      for (int64_t i = 0; i < width; i++) newest[i] = load(from[i]);
#pragma omp simd
      for (int64_t i = 0; i < width; i++)
        sums[i] = s.convolution_bias ? s.convolution_bias[first + i] : 0.0f;
      for (int64_t j = 0; j <= past; j++) {
        const float *weights = s.convolution + j * channels + first, *row = window + j * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) sums[i] += weights[i] * row[i];
      }
      Out *row = to + token * channels + first;
#pragma omp simd
      for (int64_t i = 0; i < width; i++) store(row + i, silu(sums[i]));
      memmove(window, window + width, static_cast<size_t>(past * width) * 4);
    }
    for (int64_t row = 0; row < past; row++) {
      T *target = slot_row(s.targets[run], row);
#pragma omp simd
      for (int64_t i = 0; i < width; i++) store(target + i, window[row * width + i]);
    }
  }
}

}  // namespace
