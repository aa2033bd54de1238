// Gated delta rule, compiled once per instruction set; dispatch.cpp chooses one.
#pragma once

#include "kernels.h"

void delta_baseline(const tw_delta *delta);
#if defined(TW_X86_64)
void delta_avx2(const tw_delta *delta);
void delta_avx512(const tw_delta *delta);
#endif
