// Products with weights in groups, compiled once per instruction set; dispatch.cpp chooses.
#pragma once

#include "kernels.h"

decltype(tw_grouped_linear) grouped_baseline;
#if defined(TW_X86_64)
decltype(tw_grouped_linear) grouped_avx2;
decltype(tw_grouped_linear) grouped_avx_vnni;
decltype(tw_grouped_linear) grouped_vnni;
#elif defined(__aarch64__)
decltype(tw_grouped_linear) grouped_dot;
decltype(tw_grouped_linear) grouped_i8mm;
#endif
