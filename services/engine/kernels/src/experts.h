// Choice of experts and the sum of their outputs, compiled once per instruction set; dispatch.cpp
// chooses.
#pragma once

#include "kernels.h"

// Adds to each row the outputs at its positions, times their factors, in order.
struct Combination {
  const void *outputs;      // [positions, width]
  const int64_t *positions;  // [num_rows, per_row]
  const float *factors;      // [num_rows, per_row]
  void *out;                 // [num_rows, width]
  int64_t num_rows;
  int64_t width;
  int64_t per_row;
  int32_t dtype;  // of outputs
  int32_t out_dtype;
};

struct ExpertKernels {
  decltype(&tw_choose_experts) choose;
  void (*combine)(const Combination &combination);
};

extern const ExpertKernels experts_baseline;
#if defined(TW_X86_64)
extern const ExpertKernels experts_avx2;
extern const ExpertKernels experts_avx512;
#endif

// Returns the kernels of the instruction set in use.
const ExpertKernels &expert_kernels();
