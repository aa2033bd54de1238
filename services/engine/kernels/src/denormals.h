// Rounding of denormal numbers to zero.
#pragma once

#if defined(TW_X86_64)
#include <immintrin.h>
#endif

namespace {

// Rounds denormal numbers to zero while it lives. Decays of many tokens multiply to such numbers,
// and arithmetic with them takes some hundred cycles.
class DenormalsAreZero {
#if defined(TW_X86_64)
 public:
  DenormalsAreZero() { _mm_setcsr(before_ | 0x8040); }
  ~DenormalsAreZero() { _mm_setcsr(before_); }

 private:
  const unsigned before_ = _mm_getcsr();
#endif
};

}  // namespace
