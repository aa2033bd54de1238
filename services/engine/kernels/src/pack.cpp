// Packing of weights into panels.
#include <math.h>
#include <string.h>

#include "int8.h"
#include "kernels.h"
#include "threads.h"
#include "tiles.h"

namespace {

constexpr float kLargest = 127;  // int8 weight

inline float weight_at(int32_t dtype, const void *weight, int64_t index) {
  if (dtype == TW_FLOAT32) return static_cast<const float *>(weight)[index];
  uint16_t bits = static_cast<const uint16_t *>(weight)[index];
  if (dtype == TW_FLOAT16) return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

// Returns the index in its panel of the weight of input k and the first output of a tile column.
// The next output's is two elements further.
inline int64_t tile_index(int64_t k, int64_t column) {
  return (k / kTileInner * 2 + column % 2) * kTile + k % kTileInner / 2 * kPair + k % 2;
}

inline uint16_t round_to_bfloat16(float value) {
  return static_cast<uint16_t>(
      _mm_extract_epi16(reinterpret_cast<__m128i>(_mm_cvtneps_pbh(_mm_set_ss(value))), 0));
}

}  // namespace

int64_t tw_tiled_packed_elements(int64_t outputs, int64_t inputs) {
  return divide_up(outputs, kPair) * kPair * divide_up(inputs, kTileInner) * kTileInner;
}

void tw_tiled_pack(int32_t dtype, const void *weight, void *packed, int64_t outputs, int64_t inputs,
                 int64_t first_tile, int64_t tile_step) {
  int64_t depth = divide_up(inputs, kTileInner);
  parallel_for(divide_up(outputs, kTileRows), [=](int64_t tile) {
    int64_t column = first_tile + tile * tile_step;
    uint16_t *panel = static_cast<uint16_t *>(packed) + column / 2 * depth * 2 * kTile;
    for (int64_t k = 0; k < depth * kTileInner; k++) {
      uint16_t *to = panel + tile_index(k, column);
      for (int64_t n = 0; n < kTileRows; n++) {
        int64_t output = tile * kTileRows + n;
        bool inside = output < outputs && k < inputs;
        to[2 * n] = inside ? round_to_bfloat16(weight_at(dtype, weight, output * inputs + k)) : 0;
      }
    }
  });
}

void tw_tiled_pack_int8(int32_t dtype, const void *weight, void *packed, float *scales,
                      int64_t outputs, int64_t inputs, int64_t first_tile, int64_t tile_step) {
  int64_t depth = divide_up(inputs, kTileInner);
  parallel_for(outputs, [=](int64_t output) {
    int64_t column = first_tile + output / kTileRows * tile_step, n = output % kTileRows;
    float largest = 0;
    for (int64_t k = 0; k < inputs; k++)
      largest = fmaxf(largest, fabsf(weight_at(dtype, weight, output * inputs + k)));
    scales[column * kTileRows + n] = largest / (kLargest * kInt8Unit);
    float inverse = largest ? kLargest / largest : 0;
    auto *panel = static_cast<int8_t *>(packed) + column / 2 * depth * 2 * kTile;
    for (int64_t k = 0; k < inputs; k++) {
      float value = weight_at(dtype, weight, output * inputs + k) * inverse;
      panel[tile_index(k, column) + 2 * n] = static_cast<int8_t>(lrintf(value));
    }
  });
}

void tw_tiled_pack_bytes(const int8_t *weight, void *packed, int64_t outputs, int64_t inputs,
                         int64_t first_tile, int64_t tile_step) {
  constexpr int64_t kTileBytes = 2 * kTile, kInputs = 2 * kTileInner;
  parallel_for(outputs, [=](int64_t output) {
    int64_t column = first_tile + output / kTileRows * tile_step, n = output % kTileRows;
    auto *panel = static_cast<int8_t *>(packed) + column / 2 * (inputs / kInputs) * 2 * kTileBytes;
    for (int64_t k = 0; k < inputs; k += 4) {
      int64_t tile = k / kInputs * 2 + column % 2, line = k % kInputs / 4;
      memcpy(panel + tile * kTileBytes + line * 64 + 4 * n, weight + output * inputs + k, 4);
    }
  });
}
