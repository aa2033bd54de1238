// Kernels in plain C++ that the compiler vectorises, compiled once per instruction set.
//
// TW_TABLE is the name of the table that this compilation defines. Everything else is in an
// anonymous namespace, and no standard template is instantiated: the linker could take a function
// that two compilations share from the wrong one.
#include "portable.h"

#include <stdlib.h>
#include <string.h>

#include "exponential.h"
#include "scalars.h"
#include "threads.h"

namespace {

// Returns tanh(x) to 2 ulp (Cephes tanhf), branch-free.
inline float hyperbolic_tangent(float x) {
  float square = x * x;
  float p = -5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  float near = p * square * x + x, far = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
  return square < 0.390625f ? near : far;
}

template <bool kAdds, typename T>
void rms_norm_row(const T *row, const T *weight, T *out, int64_t width, float epsilon) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; i++) squares += load(row[i]) * load(row[i]);
  float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + epsilon);
#pragma omp simd
  for (int64_t i = 0; i < width; i++) {
    T normed;
    store(&normed, load(row[i]) * scale * load(weight[i]));
    store(out + i, kAdds ? load(out[i]) + load(normed) : load(normed));
  }
}

// Rows of a loop's item: fewer are not worth a second thread.
constexpr int64_t kRows = 8;

template <typename Body>
void for_rows(int64_t num_rows, const Body &body) {
  parallel_for((num_rows + kRows - 1) / kRows, [&](int64_t item) {
    int64_t end = minimum((item + 1) * kRows, num_rows);
    for (int64_t row = item * kRows; row < end; row++) body(row);
  });
}

template <bool kAdds, typename T>
void norm_rows(const tw_row_norm &n) {
  for_rows(n.num_rows, [=](int64_t row) {
    for (int64_t head = 0; head < n.heads; head++) {
      const int64_t first = row * n.row_stride + head * n.width;
      rms_norm_row<kAdds>(static_cast<const T *>(n.rows) + first, static_cast<const T *>(n.weight),
                          static_cast<T *>(n.out) + first, n.width, n.epsilon);
    }
  });
}

template <typename T>
void scale_rows(const tw_scale &s) {
  for_rows(s.num_rows, [=](int64_t row) {
    T *to = static_cast<T *>(s.rows) + row * s.width;
    if (s.factor == 0) {
      memset(to, 0, static_cast<size_t>(s.width) * sizeof(T));
      return;
    }
#pragma omp simd
    for (int64_t i = 0; i < s.width; i++) {
      const float product = load(to[i]) * s.factor;
      const float above = product < -s.limit ? -s.limit : product;  // a NaN stays
      store(to + i, above > s.limit ? s.limit : above);
    }
  });
}

template <typename T>
void rotate_head(T *head, const float *cosines, const float *sines, int64_t half) {
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    float low = load(head[i]), high = load(head[half + i]);
    store(head + i, low * cosines[i] - high * sines[i]);
    store(head + half + i, high * cosines[i] + low * sines[i]);
  }
}

template <typename T>
void rotate(const tw_rotation &r) {
  int64_t half = r.head_dim / 2;
  for_rows(r.tokens, [=](int64_t token) {
    for (int64_t h = 0; h < r.num_query_heads + r.num_key_heads; h++) {
      T *head = static_cast<T *>(r.heads) + token * r.row_stride + h * r.head_dim;
      auto norm = static_cast<const T *>(h < r.num_query_heads ? r.query_norm : r.key_norm);
      if (norm) rms_norm_row<false>(head, norm, head, r.head_dim, r.epsilon);
      rotate_head(head, r.cosines + token * half, r.sines + token * half, half);
    }
  });
}

// A NaN stays one: the minimum and the maximum are the second argument if either is a NaN.
template <typename T>
void clamped_gate(const T *gate, const T *up, T *to, const tw_gate &g) {
#pragma omp simd
  for (int64_t i = 0; i < g.width; i++) {
    float x = minimum(g.limit, load(gate[i])), y = minimum(g.limit, load(up[i]));
    float opened = x / (1.0f + exponential(-g.alpha * x));
    store(to + i, opened * (maximum(-g.limit, y) + 1.0f));
  }
}

template <typename T>
void gelu_gate(const T *gate, const T *up, T *to, int64_t width) {
  constexpr float kRoot = 0.79788456080286535588f;  // of 2 / pi
#pragma omp simd
  for (int64_t i = 0; i < width; i++) {
    float x = load(gate[i]), inner = kRoot * (x + 0.044715f * x * x * x);
    store(to + i, 0.5f * x * (1.0f + hyperbolic_tangent(inner)) * load(up[i]));
  }
}

template <typename T>
void gate_rows(const tw_gate &g) {
  for_rows(g.num_rows, [=](int64_t row) {
    const T *gate = static_cast<const T *>(g.both) + row * 2 * g.width, *up = gate + g.width;
    T *to = static_cast<T *>(g.out) + row * g.out_stride;
    if (g.limit > 0) return clamped_gate(gate, up, to, g);
    if (g.is_gelu) return gelu_gate(gate, up, to, g.width);
#pragma omp simd
    for (int64_t i = 0; i < g.width; i++) {
      float x = load(gate[i]);
      store(to + i, x / (1.0f + exponential(-x)) * load(up[i]));
    }
  });
}

// Rows and columns of a block of a tiled activation.
constexpr int64_t kBlock = 32;

template <typename T>
void arrange_part(const T *from, T *to, int64_t width, int32_t arrangement) {
  switch (arrangement) {
    case TW_COPY:
      memcpy(to, from, static_cast<size_t>(width) * sizeof(T));
      break;
    case TW_MULTIPLY:
#pragma omp simd
      for (int64_t i = 0; i < width; i++) store(to + i, load(to[i]) * load(from[i]));
      break;
    case TW_MULTIPLY_BY_SIGMOID:
#pragma omp simd
      for (int64_t i = 0; i < width; i++)
        store(to + i, load(to[i]) / (1.0f + exponential(-load(from[i]))));
      break;
    case TW_MULTIPLY_BY_SOFTPLUS:
#pragma omp simd
      for (int64_t i = 0; i < width; i++) store(to + i, load(to[i]) * softplus(load(from[i])));
      break;
    case TW_ADD_ROWS:
#pragma omp simd
      for (int64_t i = 0; i < width; i++) store(to + i, load(to[i]) + load(from[i]));
      break;
  }
}

// Multiplies neighbouring numbers by the function of one gate.
template <typename T>
void gate_part(float gate, T *to, int64_t width, int32_t arrangement) {
  const float factor = arrangement == TW_MULTIPLY_BY_SOFTPLUS ? softplus(gate)
                                                              : 1.0f / (1.0f + exponential(-gate));
#pragma omp simd
  for (int64_t i = 0; i < width; i++) store(to + i, load(to[i]) * factor);
}

template <typename T>
void arrange_rows(const tw_arrange &a) {
  for_rows(a.num_rows, [=](int64_t row) {
    const T *from = static_cast<const T *>(a.rows) + row * a.row_stride;
    T *out = static_cast<T *>(a.out);
    T *to = out + row * a.width;
    if (a.is_tiled) to = out + row / kBlock * kBlock * a.width + row % kBlock * kBlock;
    const int64_t distance = a.is_tiled ? kBlock : 1;  // of neighbouring columns, block by block
    int64_t part = a.is_tiled ? kBlock : a.width;
    if (a.columns > 1) {
      part = minimum(part, a.columns);
      for (int64_t i = 0; i < a.width; i += part)
        gate_part(load(from[i / a.columns]), to + i * distance, part, a.arrangement);
      return;
    }
    for (int64_t i = 0; i < a.width; i += part)
      arrange_part(from + i, to + i * distance, part, a.arrangement);
  });
}

// Writes the products of a row with the `rank` rows of `down`, four at a time.
template <typename T>
void project(const T *row, const tw_low_rank &part, int64_t inputs, float *low) {
  auto down = static_cast<const T *>(part.down), bias = static_cast<const T *>(part.bias);
  for (int64_t k = 0; k < part.rank; k += 4) {
    const T *rows[4];
    for (int64_t j = 0; j < 4; j++) rows[j] = down + minimum(k + j, part.rank - 1) * inputs;
    float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
    for (int64_t i = 0; i < inputs; i++) {
      float x = load(row[i]);
      a += x * load(rows[0][i]);
      b += x * load(rows[1][i]);
      c += x * load(rows[2][i]);
      d += x * load(rows[3][i]);
    }
    float sums[4] = {a, b, c, d};
    for (int64_t j = 0; j < 4 && k + j < part.rank; j++)
      low[k + j] = sums[j] + (bias ? load(bias[k + j]) : 0.0f);
  }
}

constexpr int64_t kOutputs = 256;  // of an item

// Adds to the outputs of a row from `begin` to `end`, at most kOutputs.
template <typename T>
void expand(const tw_low_rank &part, const float *low, int64_t begin, int64_t end, T *out) {
  begin = begin > part.first ? begin : part.first;
  end = minimum(end, part.first + part.outputs);
  if (begin >= end) return;
  float sums[kOutputs];
#pragma omp simd
  for (int64_t i = 0; i < end - begin; i++) sums[i] = load(out[begin + i]);
  for (int64_t k = 0; k < part.rank; k++) {
    const T *up = static_cast<const T *>(part.up) + k * part.outputs + begin - part.first;
    float factor = low[k];
#pragma omp simd
    for (int64_t i = 0; i < end - begin; i++) sums[i] += factor * load(up[i]);
  }
#pragma omp simd
  for (int64_t i = 0; i < end - begin; i++) store(out + begin + i, sums[i]);
}

// Calls body(part, low) for each part of a row's adapter; `low` are its products.
template <typename Body>
void for_parts(const tw_adapt &a, int64_t row, float *low, const Body &body) {
  int32_t number = a.owners[row];
  if (number <= 0 || number >= a.num_numbers) return;
  for (int32_t p = a.starts[number]; p < a.starts[number + 1]; p++) {
    body(a.parts[p], low);
    low += a.parts[p].rank;
  }
}

template <typename T>
void adapt_rows(const tw_adapt &a) {
  auto low = static_cast<float *>(
      malloc(static_cast<size_t>(a.num_rows * a.most_rank) * sizeof(float) + 1));
  parallel_for(a.num_rows, [&](int64_t row) {
    const T *from = static_cast<const T *>(a.rows) + row * a.inputs;
    for_parts(a, row, low + row * a.most_rank, [&](const tw_low_rank &part, float *to) {
      project(from, part, a.inputs, to);
    });
  });
  parallel_for((a.outputs + kOutputs - 1) / kOutputs, [&](int64_t item) {
    int64_t begin = item * kOutputs, end = minimum(begin + kOutputs, a.outputs);
    for (int64_t row = 0; row < a.num_rows; row++) {
      T *to = static_cast<T *>(a.out) + row * a.out_stride;
      for_parts(a, row, low + row * a.most_rank, [&](const tw_low_rank &part, float *from) {
        expand(part, from, begin, end, to);
      });
    }
  });
  free(low);
}

}  // namespace

const PortableKernels TW_TABLE = {
    [](const tw_row_norm *n) {
      if (n->adds)
        (n->dtype == TW_FLOAT32 ? norm_rows<true, float> : norm_rows<true, bfloat16>)(*n);
      else
        (n->dtype == TW_FLOAT32 ? norm_rows<false, float> : norm_rows<false, bfloat16>)(*n);
    },
    [](const tw_scale *s) {
      (s->dtype == TW_FLOAT32 ? scale_rows<float> : scale_rows<bfloat16>)(*s);
    },
    [](const tw_rotation *r) {
      (r->dtype == TW_FLOAT32 ? rotate<float> : rotate<bfloat16>)(*r);
    },
    [](const tw_gate *g) {
      (g->dtype == TW_FLOAT32 ? gate_rows<float> : gate_rows<bfloat16>)(*g);
    },
    [](const tw_arrange *a) {
      (a->dtype == TW_FLOAT32 ? arrange_rows<float> : arrange_rows<bfloat16>)(*a);
    },
    [](const tw_adapt *a) {
      (a->dtype == TW_FLOAT32 ? adapt_rows<float> : adapt_rows<bfloat16>)(*a);
    },
};
