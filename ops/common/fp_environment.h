// The CPU's floating-point mode. Stands alone: no Paddle.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace paddle_gated_ops {

// Round to nearest, subnormal numbers kept, for a scope. Libraries built with -ffast-math, and Paddle's inference engine,
// switch subnormals off in the thread that runs them: results would depend on which thread computes.
class DefaultFpEnvironment {
 public:
  DefaultFpEnvironment() : saved_(Get()) { Set(kDefault); }
  ~DefaultFpEnvironment() { Set(saved_); }
  DefaultFpEnvironment(const DefaultFpEnvironment&) = delete;
  DefaultFpEnvironment& operator=(const DefaultFpEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kDefault = 0x1f80;  // MXCSR: all exceptions masked
  static uint64_t Get() { return _mm_getcsr(); }
  static void Set(uint64_t mode) { _mm_setcsr(unsigned(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;  // FPCR
  static uint64_t Get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static constexpr uint64_t kDefault = 0;
  static uint64_t Get() { return 0; }
  static void Set(uint64_t) {}
#endif

  uint64_t saved_;
};

}  // namespace paddle_gated_ops
