// BF16 and the sigmoid, for host and device. Stands alone: no Paddle, no CUDA headers.
//
// Everything is written in plain +, * and /, and the build forbids contraction (-ffp-contract=off, -fmad=false): a
// formula then gives the same bits in every loop it is inlined into, whatever the vector width, the alignment of the
// data or the path that a kernel takes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define GATED_OPS_INLINE __host__ __device__ __forceinline__
#else
#define GATED_OPS_INLINE inline __attribute__((always_inline))
#endif

namespace paddle_gated_ops {

using Bf16 = uint16_t;  // the bits of a BF16 value

GATED_OPS_INLINE float BitsToFloat(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

GATED_OPS_INLINE uint32_t FloatToBits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

GATED_OPS_INLINE float Bf16ToFloat(Bf16 value) { return BitsToFloat(uint32_t(value) << 16); }

// Rounds to the upper 16 bits, to nearest, ties to even; the lower 16 bits are left over. Every NaN becomes the same one:
// its own sign and payload depend on the order in which a compiler multiplies.
GATED_OPS_INLINE uint32_t RoundToUpperHalf(float value) {
  const uint32_t bits = FloatToBits(value);
  return value == value ? bits + (0x7fffu + ((bits >> 16) & 1u)) : 0x7fff0000u;
}

GATED_OPS_INLINE Bf16 FloatToBf16(float value) { return Bf16(RoundToUpperHalf(value) >> 16); }

// One rounding from FP64. A detour through FP32's nearest value would round twice: 1 + 2^-8 + 2^-40 would become a
// tie and then 1. So the step to FP32 rounds to odd, which no later rounding to fewer bits can tell from the value.
GATED_OPS_INLINE Bf16 DoubleToBf16(double value) {
  const float nearest = float(value);
  uint32_t bits = FloatToBits(nearest);
  const double error = value - double(nearest);
  const bool inexact = error != 0 && error == error;  // false for Inf and NaN; an overflow errs by -+Inf
  if (inexact && (bits & 1u) == 0) {
    const bool away = (error > 0) == ((bits >> 31) == 0);  // |value| > |nearest|
    bits = away ? bits + 1 : bits - 1;
  }
  return FloatToBf16(BitsToFloat(bits));
}

#ifndef __CUDA_ARCH__
// exp(-x), 2^-126 at least and Inf from x = -88.73 on; for a NaN some number. Within 2 ulp where x is a BF16 number, and
// within 2^-24 * |x| more elsewhere. Branch-free and without conversions, so that compilers vectorize it.
//
// exp(-x) = 2^(n + f) with an integer n and |f| <= 1/2; a polynomial of degree 5 errs by 2^-23.4 for 2^f.
GATED_OPS_INLINE float ExpOfNegative(float x) {
  const float kMinusLog2E = -1.44268799f;  // 16 bits: exact times a BF16 number
  const float kRest = 4.88759e-6f;         // log2(e) = 1.44268799 * (1 + kRest), to 9 digits
  const float kRound = 12582912.0f;        // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  // Clamped to [-126, 128 / (1 + kRest)], where f is 0. As bits, positive floats are ordered as signed integers, negative
  // ones by magnitude as unsigned integers: a minimum each, where a comparison of floats would have to respect NaN.
  const uint32_t kUpper = 0x42ffffaeu, kLower = 0xc2fc0000u;
  int32_t bits = int32_t(FloatToBits(x * kMinusLog2E));
  bits = bits < int32_t(kUpper) ? bits : int32_t(kUpper);
  const float t = BitsToFloat(uint32_t(bits) < kLower ? uint32_t(bits) : kLower);
  const float shifted = t + kRound;
  const float f = (t - (shifted - kRound)) + t * kRest;
  float p = 1.32647272e-3f;
  p = p * f + 9.67151269e-3f;
  p = p * f + 5.55073374e-2f;
  p = p * f + 2.40222421e-1f;
  p = p * f + 6.93146978e-1f;
  p = p * f + 1.0f;
  return BitsToFloat(FloatToBits(p) + (FloatToBits(shifted) << 23));  // n added to the exponent
}
#endif

// 1 / (1 + exp(-x)). Never NaN: exp overflows to Inf on the way and the quotient is then 0. The sigmoid of NaN is some
// number on a CPU: whoever calls it multiplies by x.
GATED_OPS_INLINE float Sigmoid(float x) {
#ifdef __CUDA_ARCH__
  // One-step exp2 and reciprocal of the special function unit; their flush to zero only touches sigmoid < 2^-126.
  float exponential, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(x * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + exponential));
  return result;
#else
  return 1.0f / (1.0f + ExpOfNegative(x));
#endif
}

// The derivative of x * sigmoid(x), given s = sigmoid(x). This form is 1 at every large x; s * (1 + x - x*s) is not.
GATED_OPS_INLINE float SiluDerivative(float x, float s) { return s * (1.0f + x * (1.0f - s)); }

}  // namespace paddle_gated_ops
