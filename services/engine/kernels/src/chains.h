// Chains of runs: each run but the first reads the state that the run before it wrote.
#pragma once

#include <cstdint>

namespace {

// Writes the first run of each chain, then `runs`. Returns the number of chains. firsts: room for
// runs + 1 numbers.
inline int64_t find_chains(const int32_t *sources, const int32_t *targets, int64_t runs,
                           int64_t *firsts) {
  int64_t chains = 0;
  for (int64_t i = 0; i < runs; i++)
    if (i == 0 || sources[i] < 0 || sources[i] != targets[i - 1]) firsts[chains++] = i;
  firsts[chains] = runs;
  return chains;
}

}  // namespace
