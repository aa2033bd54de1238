// What int8 weights stand for before their scales are applied.
#pragma once

namespace {

// Widened to bfloat16, the integer 1 becomes 2^kInt8UnitExponent: what suits AMX's way of widening.
constexpr int kInt8UnitExponent = -104;
constexpr float kInt8Unit = 0x1p-104f;

}  // namespace
