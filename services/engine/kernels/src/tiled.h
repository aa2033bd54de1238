// Tiled kernels of each instruction set that has them.
#pragma once

#include "kernels.h"

void avx512_linear(const tw_linear *linear);
void avx512_groups_linear(const tw_linear *linear);
void avx512_bytes_linear(const tw_linear *linear);
void avx512_attend(const tw_attention *attention);

void amx_linear(const tw_linear *linear);
void amx_attend(const tw_attention *attention);
