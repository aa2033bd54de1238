// Inputs that stay exact where rows are rounded to 8 bits with a scale for each 32 inputs.
//
// Models have a few inputs that are many times as large as all others. With the scale of such an
// input, its 31 neighbours would keep 2 or 3 of their bits, so it is left out of the codes, and its
// product is added by itself.
#pragma once

#include <cstdint>

namespace {

constexpr float kMostRest = 1.0f / 6;  // of an outlier: size of its largest neighbour
constexpr float kLeastRest = 1e-30f;  // of the neighbours' largest, which has to have an inverse

struct Outlier {
  int32_t input;
  int32_t row;
  float value;
};

}  // namespace
