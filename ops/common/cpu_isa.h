// One loop, compiled for each x86 vector unit, chosen at run time. Stands alone: no Paddle.
//
// Write the loop as an always-inline static function, Run<level>, of a struct; BestRun compiles it for each level and picks
// one. Sums have an order of their own, and nothing is contracted but what MulAdd asks for: all levels that have FMA
// give the same bits.
#pragma once

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define GATED_OPS_X86 1
#define GATED_OPS_AVX512_FEATURES "fma,avx512f,avx512bw,avx512dq,avx512vl"
#ifdef __clang__
#define GATED_OPS_TARGET_512(features) __attribute__((target(features), min_vector_width(512)))
#define GATED_OPS_AVX512_BF16 (__clang_major__ >= 10)
#else
#define GATED_OPS_TARGET_512(features) __attribute__((target(features ",prefer-vector-width=512")))
#define GATED_OPS_AVX512_BF16 (__GNUC__ >= 10)
#endif
#define GATED_OPS_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define GATED_OPS_TARGET_AVX512 GATED_OPS_TARGET_512(GATED_OPS_AVX512_FEATURES)
#else
#define GATED_OPS_X86 0
#define GATED_OPS_AVX512_BF16 0
#define GATED_OPS_TARGET_AVX2
#define GATED_OPS_TARGET_AVX512
#endif

#if GATED_OPS_AVX512_BF16
#define GATED_OPS_TARGET_AVX512_BF16 GATED_OPS_TARGET_512(GATED_OPS_AVX512_FEATURES ",avx512bf16")
#else
#define GATED_OPS_TARGET_AVX512_BF16 GATED_OPS_TARGET_AVX512
#endif

namespace paddle_gated_ops {

enum CpuIsaLevel { kBaseline = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kNumCpuIsaLevels = 4 };

constexpr const char* kCpuIsaNames[kNumCpuIsaLevels] = {"baseline", "avx2", "avx512", "avx512_bf16"};

// Whether MulAdd rounds once. In baseline code of x86-64 that would be a call of the C library for each number, unless the
// compiler is told of more (-march).
constexpr bool HasFma([[maybe_unused]] CpuIsaLevel level) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return true;
#else
  return level != kBaseline;
#endif
}

inline CpuIsaLevel BestCpuIsa() {
#if GATED_OPS_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kBaseline;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl")) {
    return kAvx2;
  }
#if GATED_OPS_AVX512_BF16
  if (__builtin_cpu_supports("avx512bf16")) return kAvx512Bf16;
#endif
  return kAvx512;
#else
  return kBaseline;
#endif
}

inline CpuIsaLevel CpuIsa() {
  static const CpuIsaLevel level = [] {
    const CpuIsaLevel best = BestCpuIsa();
    // GATED_OPS_CPU_ISA lowers the choice, for tests and measurements; it never raises it.
    const char* wanted = std::getenv("GATED_OPS_CPU_ISA");
    for (int lower = kBaseline; wanted != nullptr && lower < best; ++lower) {
      if (std::strcmp(wanted, kCpuIsaNames[lower]) == 0) return CpuIsaLevel(lower);
    }
    return best;
  }();
  return level;
}

// Kernel::Run of each level, where its vector unit is switched on.
template <typename Kernel, typename... Arguments>
void RunBaseline(Arguments... arguments) {
  Kernel::template Run<kBaseline>(arguments...);
}
template <typename Kernel, typename... Arguments>
GATED_OPS_TARGET_AVX2 void RunAvx2(Arguments... arguments) {
  Kernel::template Run<kAvx2>(arguments...);
}
template <typename Kernel, typename... Arguments>
GATED_OPS_TARGET_AVX512 void RunAvx512(Arguments... arguments) {
  Kernel::template Run<kAvx512>(arguments...);
}
template <typename Kernel, typename... Arguments>
GATED_OPS_TARGET_AVX512_BF16 void RunAvx512Bf16(Arguments... arguments) {
  Kernel::template Run<kAvx512Bf16>(arguments...);
}

// That of CpuIsa().
template <typename Kernel, typename... Arguments>
auto BestRun() {
  constexpr void (*kRuns[kNumCpuIsaLevels])(Arguments...) = {RunBaseline<Kernel, Arguments...>,
                                                             RunAvx2<Kernel, Arguments...>, RunAvx512<Kernel, Arguments...>,
                                                             RunAvx512Bf16<Kernel, Arguments...>};
  return kRuns[CpuIsa()];
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

}  // namespace paddle_gated_ops
