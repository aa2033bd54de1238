// Lossless compression of bfloat16 weights to 12.5 bits each.
//
// A weight's lower byte (significand and the exponent's last bit) is nearly random. Its upper byte
// (sign and the rest of the exponent) has few frequent values, because the weights of a matrix have
// similar magnitudes: a 4-bit code selects one of the step's 16 most frequent values. Weights with
// another upper byte are exceptions: none or a few in a thousand steps of the models examined.
#pragma once

#include "kernels.h"
#include "product.h"

namespace {

struct CodedException {
  uint16_t place;  // index in the step's elements
  uint16_t weight;
};

// One step of a panel.
struct alignas(64) CodedStep {
  static constexpr int64_t kUnits = kTileRows / 2;
  static constexpr uint32_t kFewExceptions = 11;  // most that are stored in the step

  // Four lines: two pairs of inputs in both tiles.
  struct Unit {
    uint8_t low[2][64];  // for each pair, both tiles' lines in the order of unpacking
    uint8_t codes[64];   // the first pair's in the lower halves of bytes
  };

  uint8_t high[16];
  uint32_t num_exceptions;
  union {
    CodedException few[kFewExceptions];
    uint32_t place;  // of more exceptions: index in the list after the last step
  };
  Unit units[kUnits];
};
static_assert(sizeof(CodedStep) == 1600);

inline const CodedException *exceptions_of(const CodedStep &step, const CodedException *more) {
  return step.num_exceptions > CodedStep::kFewExceptions ? more + step.place : step.few;
}

// Returns the exceptions that are stored after all steps.
inline const CodedException *exceptions_after(const tw_linear &a) {
  const auto *steps = static_cast<const CodedStep *>(a.packed);
  int64_t panels = divide_up(a.outputs, kPair), depth = a.inputs / kTileInner;
  return reinterpret_cast<const CodedException *>(steps + panels * depth);
}

}  // namespace
