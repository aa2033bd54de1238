// State space scan of Mamba-2, compiled once per instruction set; dispatch.cpp chooses one.
#pragma once

#include "kernels.h"

void scan_baseline(const tw_scan *scan);
#if defined(TW_X86_64)
void scan_avx2(const tw_scan *scan);
void scan_avx512(const tw_scan *scan);
#endif
