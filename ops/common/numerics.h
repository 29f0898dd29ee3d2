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

// Round to nearest, ties to even. A NaN becomes the quiet NaN of its sign.
GATED_OPS_INLINE Bf16 FloatToBf16(float value) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x7fffu;
  return Bf16((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

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
// exp(x) within 2 ulp: Cody-Waite reduction to |r| <= ln(2)/2, where a polynomial of degree 6 errs by 2^-27.
// 0 below the normal numbers, Inf past FP32's range, NaN for NaN. Branch-free, so that compilers vectorize it.
GATED_OPS_INLINE float Exp(float x) {
  const float kLog2E = 1.44269504f;
  const float kLn2Hi = 0.693359375f;        // 10 bits: n * kLn2Hi is exact
  const float kLn2Lo = -2.12194440e-4f;
  const float kRound = 12582912.0f;         // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  float clamped = x > 89.0f ? 89.0f : x;    // exp(89) is past FP32's range already
  clamped = clamped < -87.5f ? -87.5f : clamped;
  const float shifted = clamped * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * kLn2Hi) - n * kLn2Lo;
  float q = 1.37502572e-3f;  // (exp(r) - 1 - r) / r^2, minimax
  q = q * r + 8.37251078e-3f;
  q = q * r + 4.16699462e-2f;
  q = q * r + 1.66664839e-1f;
  q = q * r + 4.99999851e-1f;
  const float p = ((q * r) * r + r) + 1.0f;
  // 2^n in two factors, as n reaches 128, whose power has no FP32 number of its own. NaN: p is NaN whatever the factors.
  const int32_t power = int32_t(FloatToBits(shifted) - FloatToBits(kRound));
  const int32_t half = power >> 1;
  const float scale_a = BitsToFloat(uint32_t(half + 127) << 23);
  const float scale_b = BitsToFloat(uint32_t(power - half + 127) << 23);
  return (p * scale_a) * scale_b;
}
#endif

// 1 / (1 + exp(-x)). Never NaN for a number: exp overflows to Inf on the way and the quotient is then 0.
GATED_OPS_INLINE float Sigmoid(float x) {
#ifdef __CUDA_ARCH__
  // One-step exp2 and reciprocal of the special function unit; their flush to zero only touches sigmoid < 2^-126.
  float exponential, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(x * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + exponential));
  return result;
#else
  return 1.0f / (1.0f + Exp(-x));
#endif
}

// The derivative of x * sigmoid(x), given s = sigmoid(x). This form is 1 at every large x; s * (1 + x - x*s) is not.
GATED_OPS_INLINE float SiluDerivative(float x, float s) { return s * (1.0f + x * (1.0f - s)); }

}  // namespace paddle_gated_ops
