// BF16 and the sigmoid, for host and device. Stands alone: no Paddle, no CUDA headers.
//
// Everything is written in plain +, * and / and MulAdd, and the build forbids contraction (-ffp-contract=off, -fmad=false):
// a formula then gives the same bits in every loop it is inlined into with the same kFma, whatever the vector width, the
// alignment of the data or the path that a kernel takes.
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

// To nearest; every NaN becomes the same one, the one that a GPU makes.
GATED_OPS_INLINE float DoubleToFloat(double value) {
#ifdef __CUDA_ARCH__
  return float(value);
#else
  return value == value ? float(value) : BitsToFloat(0x7fffffffu);
#endif
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

// a * b + c, rounded once where kFma and after each step where not.
template <bool kFma>
GATED_OPS_INLINE float MulAdd(float a, float b, float c) {
#ifndef __CUDA_ARCH__
  if constexpr (kFma) return __builtin_fmaf(a, b, c);
#endif
  return a * b + c;
}

// 1 / (1 + exp(-x)), never NaN. The sigmoid of NaN is some number on a CPU: whoever calls it multiplies by x.
//
// On a CPU within 3 ulp where x is a BF16 number, within 2^-24 * |x| more elsewhere, and 0 from x = -88.38 on. Branch-free
// and without conversions, so that compilers vectorize it. exp(-x) = 2^n * 2^f with an integer n and |f| <= 1/2, and 2^f is
// (1 + y) / (1 - y) with y = tanh(f * ln(2) / 2), an odd function, which takes few terms: the one division does for both.
template <bool kFma = false>
GATED_OPS_INLINE float Sigmoid(float x) {
#ifdef __CUDA_ARCH__
  // One-step exp2 and reciprocal of the special function unit; their flush to zero only touches sigmoid < 2^-126.
  float exponential, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(x * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + exponential));
  return result;
#else
  // A quarter of n + f: scaled so, the polynomial's last coefficient is 1 and costs no multiplication.
  const float kMinusLog2E = -1.44268799f / 4;       // 16 bits: exact times a BF16 number
  const float kRest = 4.88759e-6f;                  // log2(e) = 1.44268799 * (1 + kRest), to 9 digits
  const float kRound = (12582912.0f + 127.0f) / 4;  // 1.5 * 2^23: adding it leaves n + 127 in the low bits
  // Clamped to [-127, 128] / 4, where 2^n is 0 and Inf. As bits, positive floats are ordered as signed integers, negative
  // ones by magnitude as unsigned integers: a minimum each, where a comparison of floats would have to respect NaN.
  const uint32_t kUpper = 0x42000000u, kLower = 0xc1fe0000u;
  int32_t bits = int32_t(FloatToBits(x * kMinusLog2E));
  bits = bits < int32_t(kUpper) ? bits : int32_t(kUpper);
  const float t = BitsToFloat(uint32_t(bits) < kLower ? uint32_t(bits) : kLower);
  const float shifted = t + kRound;
  const float power = BitsToFloat(FloatToBits(shifted) << 23);  // 2^n
  const float f = MulAdd<kFma>(t, kRest, t - (shifted - kRound));
  const float square = f * f;
  const float y = f * MulAdd<kFma>(square - 1.33188934f, square, 2.07944108f);  // 1.5 * tanh, within 2^-27
  const float below = 1.5f - y;
  return below / MulAdd<kFma>(power, 1.5f + y, below);
#endif
}

// The derivative of x * sigmoid(x), given s = sigmoid(x). This form is 1 at every large x; s * (1 + x - x*s) is not.
template <bool kFma = false>
GATED_OPS_INLINE float SiluDerivative(float x, float s) {
  return s * MulAdd<kFma>(x, 1.0f - s, 1.0f);
}

}  // namespace paddle_gated_ops
