// Argmax of each row's products, found without storing them.
#pragma once

#include "buffer.h"
#include "kernels.h"
#include "tiles.h"

namespace {

// Largest product so far in each of 16 lanes, the first of equals, and its column.
struct alignas(64) Largest {
  float value[kTileRows];
  int32_t column[kTileRows];
};

// State of the rows in the thread's current item, indexed by row.
thread_local Buffer largest;

inline Largest *begin_search(const tw_linear &a, int64_t start, int64_t end) {
  auto *rows = static_cast<Largest *>(
      largest.reserve(a.num_rows * static_cast<int64_t>(sizeof(Largest))));
  for (int64_t row = start; row < end; row++) {
    _mm512_store_ps(rows[row].value, _mm512_set1_ps(-__builtin_inff()));
    _mm512_store_si512(rows[row].column, _mm512_setzero_si512());
  }
  return rows;
}

// Updates a row with its products in columns `column` to `column` + 31 that the mask selects.
inline void search(Largest &row, int64_t column, __m512 low, __m512 high, uint32_t mask) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512 value = _mm512_load_ps(row.value);
  __m512i where = _mm512_load_si512(row.column);
  __m512i columns = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(column)));
  auto inside = static_cast<__mmask16>(mask);
  __mmask16 more = _mm512_mask_cmp_ps_mask(inside, low, value, _CMP_GT_OQ);
  value = _mm512_mask_mov_ps(value, more, low);
  where = _mm512_mask_mov_epi32(where, more, columns);
  inside = static_cast<__mmask16>(mask >> kTileRows);
  more = _mm512_mask_cmp_ps_mask(inside, high, value, _CMP_GT_OQ);
  value = _mm512_mask_mov_ps(value, more, high);
  where = _mm512_mask_add_epi32(where, more, columns, _mm512_set1_epi32(kTileRows));
  _mm512_store_ps(row.value, value);
  _mm512_store_si512(row.column, where);
}

// Merges the maxima of some columns into `out` as one number per row. Larger products give larger
// numbers; of equal products, earlier columns do.
inline void end_search(const Largest *rows, int64_t start, int64_t end, uint64_t *out) {
  for (int64_t row = start; row < end; row++) {
    // Adding zero turns -0 into +0.
    __m512 value = _mm512_add_ps(_mm512_load_ps(rows[row].value), _mm512_setzero_ps());
    float most = _mm512_reduce_max_ps(value);
    __mmask16 equal = _mm512_cmp_ps_mask(value, _mm512_set1_ps(most), _CMP_EQ_OQ);
    uint32_t column = static_cast<uint32_t>(
        _mm512_mask_reduce_min_epi32(equal, _mm512_load_si512(rows[row].column)));
    uint32_t bits = static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(most))));
    uint64_t order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    uint64_t found = order << 32 | static_cast<uint32_t>(~column);
    uint64_t before = __atomic_load_n(out + row, __ATOMIC_RELAXED);
    while (before < found && !__atomic_compare_exchange_n(out + row, &before, found, false,
                                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
}

// Returns the column in such a number, or -1 if no product is above minus infinity.
inline uint64_t column_of(uint64_t found) {
  constexpr uint32_t kMinusInfinity = 0x007fffffu;  // in end_search's order
  return found >> 32 > kMinusInfinity ? static_cast<uint32_t>(~found) : ~uint64_t{0};
}

}  // namespace
