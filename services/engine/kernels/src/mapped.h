// Packing of mapped weights, compiled once per instruction set; dispatch.cpp chooses.
#pragma once

#include "kernels.h"

decltype(tw_pack_mapped) mapped_baseline;
#if defined(TW_X86_64)
decltype(tw_pack_mapped) mapped_avx2;
decltype(tw_pack_mapped) mapped_avx512;
#endif
