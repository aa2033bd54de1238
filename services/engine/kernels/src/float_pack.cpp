// Packing of weights in floating point (float_layout.h).
#include <string.h>

#include "float_layout.h"
#include "threads.h"

namespace {

constexpr int64_t kInputs = 64;  // whose lines stay in the L1 cache while outputs pass

template <typename T>
void pack_panel(const T *weight, int64_t row_stride, int64_t count, int64_t inputs, bool pairs,
                T *lines) {
  if (count < kPanel) memset(lines, 0, static_cast<size_t>(kPanel * inputs) * sizeof(T));
  for (int64_t first = 0; first < inputs; first += kInputs) {
    const int64_t end = first + kInputs < inputs ? first + kInputs : inputs;
    for (int64_t output = 0; output < count; output++) {
      const T *from = weight + output * row_stride;
      T *to = lines + (pairs ? output % (kPanel / 2) * 2 + output / (kPanel / 2) : output);
      for (int64_t input = first; input < end; input++) to[input * kPanel] = from[input];
    }
  }
}

template <typename T>
void pack_weight(const void *weight, int64_t row_stride, void *packed, int64_t outputs,
                 int64_t inputs, bool pairs) {
  parallel_for(panels_of(outputs), [=](int64_t panel) {
    const int64_t first = panel * kPanel, left = outputs - first;
    pack_panel(static_cast<const T *>(weight) + first * row_stride, row_stride,
               left < kPanel ? left : kPanel, inputs, pairs,
               static_cast<T *>(packed) + panel * kPanel * inputs);
  });
}

}  // namespace

int64_t tw_float_packed_elements(int64_t outputs, int64_t inputs) {
  return panels_of(outputs) * kPanel * inputs;
}

void tw_float_pack(int32_t dtype, const void *weight, int64_t row_stride, void *packed,
                   int64_t outputs, int64_t inputs) {
  const auto pack = dtype == TW_FLOAT32 ? pack_weight<uint32_t> : pack_weight<uint16_t>;
  pack(weight, row_stride, packed, outputs, inputs, dtype == TW_BFLOAT16);
}
