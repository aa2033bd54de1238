// Layout of weights in floating point.
//
// A panel is 32 neighbouring outputs, zeros after the last one. Of each panel, the inputs follow
// each other: a line of one weight for each output. A line of bfloat16 pairs outputs j and j + 16,
// so that a shift widens the first of each pair, and a mask the second.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace {

constexpr int64_t kPanel = 32;

constexpr int64_t bytes_of(int32_t dtype) { return dtype == TW_FLOAT32 ? 4 : 2; }

inline int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

}  // namespace
