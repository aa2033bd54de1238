// Rounding of denormal numbers to zero.
#pragma once

#include <cstdint>

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
#elif defined(__aarch64__)
 public:
  DenormalsAreZero() { set(before_ | 1u << 24); }
  ~DenormalsAreZero() { set(before_); }

 private:
  static uint64_t get() {
    uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void set(uint64_t control) { asm volatile("msr fpcr, %0" : : "r"(control)); }

  const uint64_t before_ = get();
#endif
};

}  // namespace
