// Selective scan of Mamba, compiled once per instruction set; dispatch.cpp chooses one.
#pragma once

#include "kernels.h"

void selective_convolve_baseline(const tw_selective *scan);
void selective_scan_baseline(const tw_selective *scan);
#if defined(TW_X86_64)
void selective_convolve_avx2(const tw_selective *scan);
void selective_scan_avx2(const tw_selective *scan);
void selective_convolve_avx512(const tw_selective *scan);
void selective_scan_avx512(const tw_selective *scan);
#endif
