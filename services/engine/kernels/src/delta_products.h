// Products of the gated delta rule: of panels of its state, and of rows.
#pragma once

#include <string.h>

#include <cstdint>

namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kRows = 8;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8, kRows = 4;
#else
constexpr int64_t kLanes = 4, kRows = 4;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

constexpr int64_t kPad = 8;     // rows of the products' operands are a multiple of it
constexpr int64_t kPanel = 32;  // columns of the state that lie together

int64_t round_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

inline Lanes load_lanes(const float *from) {
  Lanes lanes;
  memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

// Rows of floats, element [i][j] at i * row + j * column.
struct Matrix {
  const float *data;
  int64_t row, column;
};

// c [rows, kPanel] = scales * c + a [rows, inner] b [inner, kPanel]. rows: a multiple of kPad.
// scales: [rows], or null for 1.
void multiply(int64_t rows, int64_t inner, Matrix a, const float *b, int64_t b_row, float *c,
              int64_t c_row, const float *scales) {
  for (int64_t i = 0; i < rows; i += kRows) {
    for (int64_t j = 0; j < kPanel; j += 2 * kLanes) {
      Lanes sums[kRows][2];
#pragma GCC unroll 8
      for (int64_t r = 0; r < kRows; r++) {
        const float *from = c + (i + r) * c_row + j;
        const float scale = scales ? scales[i + r] : 1.0f;
        sums[r][0] = load_lanes(from) * scale;
        sums[r][1] = load_lanes(from + kLanes) * scale;
      }
      for (int64_t k = 0; k < inner; k++) {
        const float *right = b + k * b_row + j;
        const Lanes low = load_lanes(right), high = load_lanes(right + kLanes);
        const float *factors = a.data + i * a.row + k * a.column;
#pragma GCC unroll 8
        for (int64_t r = 0; r < kRows; r++) {
          sums[r][0] += factors[r * a.row] * low;
          sums[r][1] += factors[r * a.row] * high;
        }
      }
#pragma GCC unroll 8
      for (int64_t r = 0; r < kRows; r++) {
        float *to = c + (i + r) * c_row + j;
        memcpy(to, &sums[r][0], sizeof sums[r][0]);
        memcpy(to + kLanes, &sums[r][1], sizeof sums[r][1]);
      }
    }
  }
}

// to [width] += the sum of factors[j] * rows[j] for j below count.
void add_rows(float *to, const float *factors, const float *rows, int64_t count, int64_t width) {
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    const float *row = rows + j * width;
#pragma omp simd
    for (int64_t i = 0; i < width; i++)
      to[i] += factors[j] * row[i] + factors[j + 1] * row[width + i] +
               factors[j + 2] * row[2 * width + i] + factors[j + 3] * row[3 * width + i];
  }
  for (; j < count; j++) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) to[i] += factors[j] * rows[j * width + i];
  }
}

float dot(const float *a, const float *b, int64_t width) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; i++) sum += a[i] * b[i];
  return sum;
}

}  // namespace
