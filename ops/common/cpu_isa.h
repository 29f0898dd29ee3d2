// One loop, compiled for each x86 vector unit, chosen at run time. Stands alone: no Paddle.
//
// Write the loop as an always-inline function template, wrap it three times with GATED_OPS_TARGET_*, and pick with
// CpuIsa(). The results are the same bits on each: no contraction, and sums have an order of their own.
#pragma once

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define GATED_OPS_X86 1
#define GATED_OPS_TARGET_AVX2 __attribute__((target("avx2")))
#ifdef __clang__
#define GATED_OPS_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), min_vector_width(512)))
#else
#define GATED_OPS_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#else
#define GATED_OPS_X86 0
#define GATED_OPS_TARGET_AVX2
#define GATED_OPS_TARGET_AVX512
#endif

namespace paddle_gated_ops {

enum CpuIsaLevel { kBaseline = 0, kAvx2 = 1, kAvx512 = 2, kNumCpuIsaLevels = 3 };

inline CpuIsaLevel DetectCpuIsa() {
#if GATED_OPS_X86
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const CpuIsaLevel best = avx512 ? kAvx512 : __builtin_cpu_supports("avx2") ? kAvx2 : kBaseline;
  // GATED_OPS_CPU_ISA lowers the choice, for tests and measurements; it never raises it.
  const char* wanted = std::getenv("GATED_OPS_CPU_ISA");
  if (wanted != nullptr && std::strcmp(wanted, "baseline") == 0) return kBaseline;
  if (wanted != nullptr && std::strcmp(wanted, "avx2") == 0 && best > kAvx2) return kAvx2;
  return best;
#else
  return kBaseline;
#endif
}

inline CpuIsaLevel CpuIsa() {
  static const CpuIsaLevel level = DetectCpuIsa();
  return level;
}

// Whether stores past the caches are worth their detour: a fifth on a Xeon at 1 GiB, where an EPYC lost 5 %.
inline bool StreamsPay() {
#if GATED_OPS_X86
  static const bool intel = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
  }();
  return intel;
#else
  return false;
#endif
}

inline const char* CpuIsaName(CpuIsaLevel level) {
  const char* const names[kNumCpuIsaLevels] = {"baseline", "avx2", "avx512"};
  return names[level];
}

}  // namespace paddle_gated_ops
