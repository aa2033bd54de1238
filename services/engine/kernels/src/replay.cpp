// Replay of a recorded pass through a model's layers on other rows.
#include <string.h>

#include <chrono>

#include "kernels.h"

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Rows that kernels run on: all tokens, or the kept ones.
struct Rows {
  int64_t count;
  const int32_t *query_starts;
  bool are_kept;
};

// Gives a call this pass's arguments, and returns it.
tw_attention &of_pass(tw_attention &call, const tw_pass &pass, const Rows &rows) {
  const tw_tables &tables = pass.tables[call.cache_group];
  call.slots = tables.slots;
  call.query_starts = rows.query_starts;
  call.ends = rows.are_kept ? tables.kept_ends : tables.ends;
  call.context_lengths = pass.context_lengths;
  call.block_tables = tables.block_tables;
  call.table_stride = tables.table_stride;
  if (call.keys) call.tokens = pass.tokens;
  call.sequences = pass.sequences;
  return call;
}

tw_latent &of_pass(tw_latent &call, const tw_pass &pass) {
  const tw_tables &tables = pass.tables[call.cache_group];
  call.slots = tables.slots;
  call.context_lengths = pass.context_lengths;
  call.block_tables = tables.block_tables;
  call.table_stride = tables.table_stride;
  call.tokens = pass.tokens;
  call.sequences = pass.sequences;
  return call;
}

// Runs a copy of a recorded operation with this pass's arguments.
void run(tw_operation operation, const tw_pass &pass, Rows &rows) {
  switch (operation.kernel) {
#if defined(TW_X86_64)
    case TW_NORM:
      operation.call.norm.num_rows = rows.count;
      return tw_tiled_rms_norm(&operation.call.norm);
    case TW_LINEAR:
      operation.call.linear.num_rows = rows.count;
      return tw_tiled_linear(&operation.call.linear);
    case TW_ATTENTION:
      return tw_tiled_attend(&of_pass(operation.call.attention, pass, rows));
#else
    case TW_NORM:
    case TW_LINEAR:
    case TW_ATTENTION:
      return;  // without tiles, these are not recorded
#endif
    case TW_ROTATION:
      operation.call.rotation.tokens = pass.tokens;
      return tw_rotate(&operation.call.rotation);
    case TW_ROW_NORM:
      operation.call.row_norm.num_rows = rows.count;
      return tw_norm_rows(&operation.call.row_norm);
    case TW_SCALE:
      operation.call.scale.num_rows = rows.count;
      return tw_scale_rows(&operation.call.scale);
    case TW_GROUPED_LINEAR:
      operation.call.grouped_linear.num_rows = rows.count;
      return tw_grouped_linear(&operation.call.grouped_linear);
    case TW_FLOAT_LINEAR:
      operation.call.float_linear.num_rows = rows.count;
      return tw_float_linear(&operation.call.float_linear);
    case TW_GATE_ROWS:
      operation.call.gate_rows.num_rows = rows.count;
      return tw_gate_rows(&operation.call.gate_rows);
    case TW_ARRANGE:
      operation.call.arrange.num_rows = rows.count;
      return tw_arrange_rows(&operation.call.arrange);
    case TW_MIXTURE:
      operation.call.mixture.num_rows = rows.count;
      return tw_mix_experts(&operation.call.mixture);
    case TW_LATENT_DECODE:
      return tw_latent_decode(&of_pass(operation.call.latent_decode, pass));
    case TW_PAGED_ATTENTION:
      return tw_paged_attend(&of_pass(operation.call.paged_attention, pass, rows));
    case TW_DELTA_RULE:
      operation.call.delta_rule.starts = pass.state_starts;
      operation.call.delta_rule.sources = pass.state_sources;
      operation.call.delta_rule.targets = pass.state_targets;
      operation.call.delta_rule.runs = pass.state_runs;
      return tw_delta_rule(&operation.call.delta_rule);
    case TW_STATE_SCAN:
      operation.call.state_scan.starts = pass.state_starts;
      operation.call.state_scan.sources = pass.state_sources;
      operation.call.state_scan.targets = pass.state_targets;
      operation.call.state_scan.runs = pass.state_runs;
      return tw_state_scan(&operation.call.state_scan);
    case TW_KEEP:
      operation.call.keep.kept = pass.kept;
      operation.call.keep.num_kept = pass.num_kept;
      if (pass.kept) rows = {pass.num_kept, pass.kept_starts, true};
      return tw_keep_rows(&operation.call.keep);
  }
}

}  // namespace

void tw_keep_rows(const tw_keep *keep) {
  if (!keep->kept) return;
  auto rows = static_cast<char *>(keep->rows);
  for (int64_t i = 0; i < keep->num_kept; i++)
    if (keep->kept[i] != i)
      memcpy(rows + i * keep->row_stride, rows + keep->kept[i] * keep->row_stride,
             static_cast<size_t>(keep->row_bytes));
}

void tw_replay(const tw_operation *operations, int64_t count, const tw_pass *pass) {
  Rows rows{pass->tokens, pass->query_starts, false};
  for (int64_t i = 0; i < count; i++) {
    double began = pass->seconds ? now() : 0;
    run(operations[i], *pass, rows);
    if (pass->seconds) pass->seconds[operations[i].kernel] += now() - began;
  }
}
