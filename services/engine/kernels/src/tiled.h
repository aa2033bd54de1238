// What computes on tiles, for each instruction set that does.
#pragma once

#include "kernels.h"

void avx512_linear(const tw_linear *linear);
void avx512_attend(const tw_attention *attention);

void amx_linear(const tw_linear *linear);
void amx_attend(const tw_attention *attention);
