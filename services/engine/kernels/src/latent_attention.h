// Attention of decodes over a paged cache of latents, compiled once per instruction set.
#pragma once

#include "kernels.h"

void latent_baseline(const tw_latent *latent);
#if defined(TW_X86_64)
void latent_avx2(const tw_latent *latent);
void latent_avx512(const tw_latent *latent);
#endif
