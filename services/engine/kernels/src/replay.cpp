// A recorded pass through a model's layers, run again on other rows.
#include <chrono>

#include "kernels.h"

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Runs a copy of what was recorded, with this pass's rows in it.
void run(tw_operation operation, const tw_pass &pass) {
  switch (operation.kernel) {
    case TW_NORM:
      operation.norm.num_rows = pass.tokens;
      return tw_tiled_rms_norm(&operation.norm);
    case TW_LINEAR:
      operation.linear.num_rows = pass.tokens;
      return tw_tiled_linear(&operation.linear);
    case TW_ROTATION:
      operation.rotation.tokens = pass.tokens;
      return tw_rotate(&operation.rotation);
    case TW_ATTENTION:
      operation.attention.slots = pass.slots;
      operation.attention.query_starts = pass.query_starts;
      operation.attention.context_lengths = pass.context_lengths;
      operation.attention.block_tables = pass.block_tables;
      operation.attention.table_stride = pass.table_stride;
      operation.attention.tokens = pass.tokens;
      operation.attention.sequences = pass.sequences;
      return tw_tiled_attend(&operation.attention);
  }
}

}  // namespace

void tw_replay(const tw_operation *operations, int64_t count, const tw_pass *pass) {
  for (int64_t i = 0; i < count; i++) {
    double began = pass->seconds ? now() : 0;
    run(operations[i], *pass);
    if (pass->seconds) pass->seconds[operations[i].kernel] += now() - began;
  }
}
