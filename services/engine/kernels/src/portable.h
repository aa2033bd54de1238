// Kernels compiled once per instruction set; dispatch.cpp chooses a table of them.
#pragma once

#include "kernels.h"

struct PortableKernels {
  decltype(&tw_norm_rows) norm_rows;
  decltype(&tw_scale_rows) scale_rows;
  decltype(&tw_rotate) rotate;
  decltype(&tw_gate_rows) gate_rows;
  decltype(&tw_arrange_rows) arrange_rows;
  decltype(&tw_adapt_rows) adapt_rows;
};

extern const PortableKernels portable_baseline;
#if defined(TW_X86_64)
extern const PortableKernels portable_avx2;
extern const PortableKernels portable_avx512;
#endif
