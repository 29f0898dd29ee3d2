// Sums over the lanes of a group, in an order of their own: the same bits on every GPU.
#pragma once

namespace paddle_gated_ops {

constexpr unsigned kFullWarp = 0xffffffffu;

// The sum over `width` neighbouring lanes (a power of two up to 32), in each of them. The whole warp must call it.
template <typename T>
__device__ __forceinline__ T GroupSum(T value, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}

// A tree over eight numbers of one thread.
template <typename T>
__device__ __forceinline__ T TreeSum8(const T (&v)[8]) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

}  // namespace paddle_gated_ops
