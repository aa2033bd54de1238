// Run-time choice of the instruction set, to which the C interface is forwarded.
#include "buffer.h"
#include "delta_rule.h"
#include "draw.h"
#include "experts.h"
#include "float_linear.h"
#include "grouped.h"
#include "latent_attention.h"
#include "mapped.h"
#include "paged_attention.h"
#include "portable.h"
#include "selective_scan.h"
#include "state_scan.h"
#include "threads.h"

#if defined(TW_X86_64)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(TW_X86_64)
bool detect_vnni() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vnni");
}

const bool has_vnni = detect_vnni();

// Not every compiler's __builtin_cpu_supports knows AVX-VNNI: VNNI of 256 bits without AVX-512.
bool detect_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & (1u << 4);
}

const bool has_avx_vnni = detect_avx_vnni();

// Not every compiler's __builtin_cpu_supports knows F16C either.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && c & (1u << 29);
}

// Every processor with AMX has AVX-512 FP16, but a virtual machine may hide it.
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  bool fp16 = d & (1u << 23), bf16 = d & (1u << 22), tile = d & (1u << 24), int8 = d & (1u << 25);
  if (!fp16 || !bf16 || !tile || !int8) return false;
#if defined(__linux__)
  // Linux grants the tile registers on request only (ARCH_REQ_XCOMP_PERM, XTILEDATA).
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}
#elif defined(__aarch64__)
// Returns bits of the processor's features, as Linux numbers them. type: 16 or 26, AT_HWCAP or
// AT_HWCAP2.
unsigned long features(unsigned long type) {
#if defined(__linux__)
  return getauxval(type);
#else
  return 0 * type;
#endif
}

const bool has_dot = features(16) >> 20 & 1;
const bool has_i8mm = features(26) >> 13 & 1;
#endif

tw_instructions detect() {
#if defined(TW_X86_64)
  // __builtin_cpu_supports also checks that the operating system saves the registers.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    if (!__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512bf16"))
      return TW_AVX512;
    return has_amx() ? TW_AMX : TW_AVX512_BF16;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
    return TW_AVX2;
#elif defined(__aarch64__)
  return TW_NEON;
#endif
  return TW_BASELINE;
}

thread_local Buffer ungated;  // products that tw_gate_rows reads

const tw_instructions available = detect();
tw_instructions in_use = available;

const PortableKernels &portable() {
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512) return portable_avx512;
  if (in_use == TW_AVX2) return portable_avx2;
#endif
  return portable_baseline;
}

}  // namespace

int32_t tw_instruction_set() { return in_use; }

int32_t tw_limit_instruction_set(int32_t highest) {
  in_use = highest < available ? static_cast<tw_instructions>(highest) : available;
  return in_use;
}

void tw_norm_rows(const tw_row_norm *norm) { portable().norm_rows(norm); }

void tw_scale_rows(const tw_scale *scale) { portable().scale_rows(scale); }

void tw_rotate(const tw_rotation *rotation) { portable().rotate(rotation); }

void tw_arrange_rows(const tw_arrange *arrange) { portable().arrange_rows(arrange); }

void tw_adapt_rows(const tw_adapt *adapt) { portable().adapt_rows(adapt); }

void tw_paged_attend(const tw_attention *attention) {
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512) return paged_avx512(attention);
  if (in_use == TW_AVX2) return paged_avx2(attention);
#endif
  paged_baseline(attention);
}

void tw_delta_rule(const tw_delta *delta) {
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512) return delta_avx512(delta);
  if (in_use == TW_AVX2) return delta_avx2(delta);
#endif
  delta_baseline(delta);
}

void tw_latent_decode(const tw_latent *latent) {
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512) return latent_avx512(latent);
  if (in_use == TW_AVX2) return latent_avx2(latent);
#endif
  latent_baseline(latent);
}

void tw_state_scan(const tw_scan *scan) {
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512) return scan_avx512(scan);
  if (in_use == TW_AVX2) return scan_avx2(scan);
#endif
  scan_baseline(scan);
}

void tw_selective_convolve(const tw_selective *scan) {
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512) return selective_convolve_avx512(scan);
  if (in_use == TW_AVX2) return selective_convolve_avx2(scan);
#endif
  selective_convolve_baseline(scan);
}

void tw_selective_scan(const tw_selective *scan) {
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512) return selective_scan_avx512(scan);
  if (in_use == TW_AVX2) return selective_scan_avx2(scan);
#endif
  selective_scan_baseline(scan);
}

void tw_draw_tokens(tw_draw *draws, int64_t count, int64_t vocabulary) {
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512) return draw_avx512(draws, count, vocabulary);
  if (in_use == TW_AVX2) return draw_avx2(draws, count, vocabulary);
#endif
  draw_baseline(draws, count, vocabulary);
}

void tw_score_tokens(tw_score *scores, int64_t count, int64_t vocabulary, int64_t width) {
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512) return score_avx512(scores, count, vocabulary, width);
  if (in_use == TW_AVX2) return score_avx2(scores, count, vocabulary, width);
#endif
  score_baseline(scores, count, vocabulary, width);
}

const ExpertKernels &expert_kernels() {
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512) return experts_avx512;
  if (in_use == TW_AVX2) return experts_avx2;
#endif
  return experts_baseline;
}

void tw_choose_experts(const tw_routing *routing, const float *scores, int64_t num_rows,
                       int64_t *chosen, float *weights) {
  expert_kernels().choose(routing, scores, num_rows, chosen, weights);
}

void tw_pack_mapped(const tw_grouped *grouped, int64_t first, int64_t count, uint8_t *packed) {
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512) return mapped_avx512(grouped, first, count, packed);
  if (in_use == TW_AVX2) return mapped_avx2(grouped, first, count, packed);
#endif
  mapped_baseline(grouped, first, count, packed);
}

void tw_grouped_linear(const tw_grouped *grouped) {
  tw_grouped call = *grouped;
  if (!is_in_loop()) tw_prefetch_mapped(grouped);
  const int64_t element = call.out_dtype == TW_FLOAT32 ? 4 : 2;
  if (!call.out) call.out = ungated.reserve(call.num_rows * call.out_stride * element);
  call.out = static_cast<uint8_t *>(call.out) + call.first_output * element;
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512 && has_vnni) return grouped_vnni(&call);
  if (in_use >= TW_AVX2 && has_avx_vnni) return grouped_avx_vnni(&call);
  if (in_use >= TW_AVX2) return grouped_avx2(&call);
#elif defined(__aarch64__)
  if (has_i8mm) return grouped_i8mm(&call);
  if (has_dot) return grouped_dot(&call);
#endif
  grouped_baseline(&call);
}

void tw_float_linear(const tw_float_product *product) {
  tw_float_product call = *product;
  const int64_t element = call.out_dtype == TW_FLOAT32 ? 4 : 2;
  if (!call.out) call.out = ungated.reserve(call.num_rows * call.out_stride * element);
#if defined(TW_X86_64)
  if (in_use >= TW_AVX512) return float_linear_avx512(&call);
  if (in_use == TW_AVX2) return float_linear_avx2(&call);
#endif
  float_linear_baseline(&call);
}

void tw_gate_rows(const tw_gate *gate) {
  tw_gate call = *gate;
  const int64_t element = call.dtype == TW_FLOAT32 ? 4 : 2;
  if (!call.both) call.both = ungated.reserve(call.num_rows * 2 * call.width * element);
  portable().gate_rows(&call);
}
