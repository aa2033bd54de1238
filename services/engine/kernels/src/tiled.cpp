// Run-time choice of the tiled kernels.
#include "tiled.h"

#include "threads.h"

namespace {

bool has_amx() { return tw_instruction_set() >= TW_AMX; }

}  // namespace

void tw_tiled_linear(const tw_linear *linear) {
  if (linear->format == TW_GROUPS && !is_in_loop()) tw_prefetch_mapped(linear->groups);
  bool by_amx = has_amx() && linear->format != TW_CODED;
  by_amx ? amx_linear(linear) : avx512_linear(linear);
}

void tw_tiled_attend(const tw_attention *attention) {
  has_amx() ? amx_attend(attention) : avx512_attend(attention);
}
