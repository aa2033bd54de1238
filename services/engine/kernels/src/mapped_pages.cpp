// Pages of mapped weights.
#include <sys/mman.h>
#include <unistd.h>

#include "kernels.h"

namespace {

const uintptr_t page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));

void prefetch(const uint8_t *from, int64_t bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(from), begin = address & -page_bytes;
  posix_madvise(reinterpret_cast<void *>(begin), address + static_cast<uintptr_t>(bytes) - begin,
                POSIX_MADV_WILLNEED);
}

}  // namespace

void tw_prefetch_mapped(const tw_grouped *grouped) {
  if (!grouped->mapped) return;
  const tw_blocks *weight = grouped->mapped->weights;
  for (const tw_blocks *end = weight + grouped->mapped->count; weight < end; weight++)
    prefetch(weight->codes.rows, weight->num_rows * weight->codes.row_bytes);
}
