// RMSNorm and LayerNorm into tiles.
#include "kernels.h"
#include "threads.h"
#include "tiles.h"

namespace {

constexpr int64_t kRows = 8;  // of a loop's item
constexpr int64_t kHalf = kTileInner / 2;

inline __m512 load16(const uint16_t *from) {
  return to_float(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}

inline __m512bh load32(const uint16_t *from) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
}

template <bool kStreams>
void normalize(const uint16_t *row, const uint16_t *weight, uint16_t *out, int64_t width,
               float epsilon) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += kTileInner) {
    __m512bh values = load32(row + i);
    squares = _mm512_dpbf16_ps(squares, values, values);
  }
  float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
  __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + epsilon));
  for (int64_t i = 0; i < width; i += kTileInner, out += kPair * kTileInner) {
    __m512 low = _mm512_mul_ps(_mm512_mul_ps(load16(row + i), scale), load16(weight + i));
    __m512 high = _mm512_mul_ps(_mm512_mul_ps(load16(row + i + kHalf), scale),
                                load16(weight + i + kHalf));
    auto line = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    if (kStreams)
      _mm512_stream_si512(reinterpret_cast<__m512i *>(out), line);
    else
      _mm512_store_si512(out, line);
  }
}

// `row` may be read and written.
template <bool kStreams>
void center(uint16_t *row, const uint16_t *weight, const uint16_t *bias, uint16_t *out,
            int64_t width, float epsilon, bool replaces) {
  __m512 sums = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += kHalf) sums = _mm512_add_ps(sums, load16(row + i));
  const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sums) / static_cast<float>(width));
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += kHalf) {
    __m512 centered = _mm512_sub_ps(load16(row + i), mean);
    squares = _mm512_fmadd_ps(centered, centered, squares);
  }
  float variance = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
  const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(variance + epsilon));
  const auto part = [&](int64_t i) {
    __m512 normed = _mm512_mul_ps(_mm512_sub_ps(load16(row + i), mean), scale);
    return _mm512_fmadd_ps(normed, load16(weight + i), load16(bias + i));
  };
  for (int64_t i = 0; i < width; i += kTileInner, out += kPair * kTileInner) {
    auto line = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(part(i + kHalf), part(i)));
    if (replaces) _mm512_storeu_si512(row + i, line);
    if (kStreams)
      _mm512_stream_si512(reinterpret_cast<__m512i *>(out), line);
    else
      _mm512_store_si512(out, line);
  }
}

}  // namespace

void tw_tiled_layer_norm(const tw_layer_norm *norm) {
  const tw_layer_norm &a = *norm;
  bool streams = a.num_rows * a.width * 2 > kMostCached;
  const auto center_row = streams ? center<true> : center<false>;
  parallel_for(divide_up(a.num_rows, kRows), [&](int64_t item) {
    for (int64_t row = item * kRows; row < smaller((item + 1) * kRows, a.num_rows); row++)
      center_row(static_cast<uint16_t *>(a.rows) + row * a.width,
                 static_cast<const uint16_t *>(a.weight), static_cast<const uint16_t *>(a.bias),
                 static_cast<uint16_t *>(a.tiles) + tiled(row, 0, a.width), a.width, a.epsilon,
                 a.replaces != 0);
    _mm_sfence();  // completes stores that bypass the caches before the item counts as done
  });
}

void tw_tiled_rms_norm(const tw_norm *norm) {
  const tw_norm &a = *norm;
  bool streams = a.num_rows * a.width * 2 > kMostCached;
  const auto normalize_row = streams ? normalize<true> : normalize<false>;
  parallel_for(divide_up(a.num_rows, kRows), [&](int64_t item) {
    for (int64_t row = item * kRows; row < smaller((item + 1) * kRows, a.num_rows); row++)
      normalize_row(static_cast<const uint16_t *>(a.rows) + row * a.width,
                    static_cast<const uint16_t *>(a.weight),
                    static_cast<uint16_t *>(a.tiles) + tiled(row, 0, a.width), a.width, a.epsilon);
    _mm_sfence();  // completes stores that bypass the caches before the item counts as done
  });
}
