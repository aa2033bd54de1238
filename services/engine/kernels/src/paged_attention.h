// Attention over runs of keys, compiled once per instruction set; dispatch.cpp chooses one.
#pragma once

#include "kernels.h"

void paged_baseline(const tw_attention *attention);
#if defined(TW_X86_64)
void paged_avx2(const tw_attention *attention);
void paged_avx512(const tw_attention *attention);
#endif
