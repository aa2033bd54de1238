// Pages of mapped weights.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "kernels.h"

namespace {

const uintptr_t page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));

// The kernel reads no more than the device's read-ahead for one call, which is 128 KiB by default.
constexpr uintptr_t kReadAhead = 128 << 10;

void prefetch(const uint8_t *from, int64_t bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(from);
  const uintptr_t end = address + static_cast<uintptr_t>(bytes);
  for (uintptr_t at = address & -page_bytes; at < end; at += kReadAhead)
    posix_madvise(reinterpret_cast<void *>(at), std::min(kReadAhead, end - at),
                  POSIX_MADV_WILLNEED);
}

}  // namespace

void tw_prefetch_mapped(const tw_grouped *grouped) {
  if (!grouped->mapped) return;
  const tw_blocks *weight = grouped->mapped->weights;
  for (const tw_blocks *end = weight + grouped->mapped->count; weight < end; weight++) {
    const uint8_t *codes = weight->codes.rows, *numbers = weight->numbers;
    const int64_t num_bytes = weight->num_rows * weight->codes.row_bytes;
    prefetch(codes, num_bytes);
    if (numbers < codes || numbers >= codes + num_bytes)  // a tensor of their own
      prefetch(numbers, weight->num_rows * weight->number_row_bytes);
  }
}
