// bfloat16 weights in 12.5 bits each, from which they come back bit by bit.
//
// A weight's lower byte (significand and the exponent's last bit) is as good as random. Of its upper
// one (sign and the rest of the exponent) a few values are frequent, because the weights of a matrix
// are of few magnitudes: 4 bits say which of a step's 16 most frequent ones it is. Weights with
// another one are exceptions: none or a few in a thousand steps of the models we looked at.
#pragma once

#include "kernels.h"
#include "product.h"

namespace {

struct CodedException {
  uint16_t place;  // among the step's elements
  uint16_t weight;
};

// One step of a panel.
struct alignas(64) CodedStep {
  static constexpr int64_t kUnits = kTileRows / 2;
  static constexpr uint32_t kFewExceptions = 11;  // which lie here

  // Four lines: both tiles' for two pairs of inputs.
  struct Unit {
    uint8_t low[2][64];  // for each pair, both tiles' lines as unpacking wants them
    uint8_t codes[64];   // the first pair's in the lower halves of bytes
  };

  uint8_t high[16];
  uint32_t num_exceptions;
  union {
    CodedException few[kFewExceptions];
    uint32_t place;  // of more than these, among all that follow the last step
  };
  Unit units[kUnits];
};
static_assert(sizeof(CodedStep) == 1600);

inline const CodedException *exceptions_of(const CodedStep &step, const CodedException *more) {
  return step.num_exceptions > CodedStep::kFewExceptions ? more + step.place : step.few;
}

// Those that follow all steps.
inline const CodedException *exceptions_after(const tw_linear &a) {
  const auto *steps = static_cast<const CodedStep *>(a.packed);
  int64_t panels = divide_up(a.outputs, kPair), depth = a.inputs / kTileInner;
  return reinterpret_cast<const CodedException *>(steps + panels * depth);
}

}  // namespace
