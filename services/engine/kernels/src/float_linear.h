// Products with weights in floating point, compiled once per instruction set; dispatch.cpp chooses.
#pragma once

#include "kernels.h"

decltype(tw_float_linear) float_linear_baseline;
#if defined(TW_X86_64)
decltype(tw_float_linear) float_linear_avx2;
decltype(tw_float_linear) float_linear_avx512;
#endif
