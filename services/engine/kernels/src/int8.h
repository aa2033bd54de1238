// Unit of int8 weights before their scales are applied.
#pragma once

namespace {

// Widening to bfloat16 turns the integer 1 into 2^kInt8UnitExponent, which suits the AMX
// conversion.
constexpr int kInt8UnitExponent = -104;
constexpr float kInt8Unit = 0x1p-104f;

}  // namespace
