// Drawing and scoring, compiled once per instruction set; dispatch.cpp chooses.
#pragma once

#include "kernels.h"

decltype(tw_draw_tokens) draw_baseline;
decltype(tw_score_tokens) score_baseline;
#if defined(TW_X86_64)
decltype(tw_draw_tokens) draw_avx2;
decltype(tw_draw_tokens) draw_avx512;
decltype(tw_score_tokens) score_avx2;
decltype(tw_score_tokens) score_avx512;
#endif
