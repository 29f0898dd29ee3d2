// Moving pieces of strided BF16 rows to and from FP32 buffers. Stands alone: no Paddle.
//
// The CPU kernels load a piece, compute in local buffers and store the piece: what is stored then may be the memory that
// was loaded, and the compiler vectorizes each loop without asking whether pointers alias.
#pragma once

#include "common/numerics.h"

namespace paddle_gated_ops {

GATED_OPS_INLINE void LoadRow(const Bf16* from, int64_t stride, int count, float* to) {
  if (stride == 1) {
    for (int i = 0; i < count; ++i) to[i] = Bf16ToFloat(from[i]);
  } else {
    for (int i = 0; i < count; ++i) to[i] = Bf16ToFloat(from[i * stride]);
  }
}

GATED_OPS_INLINE void StoreRow(const float* from, int count, Bf16* to, int64_t stride) {
  if (stride == 1) {
    for (int i = 0; i < count; ++i) to[i] = FloatToBf16(from[i]);
  } else {
    for (int i = 0; i < count; ++i) to[i * stride] = FloatToBf16(from[i]);
  }
}

// The sum of kLanes * kSteps numbers: kSteps additions in sequence in each lane, then a tree over the lanes.
template <int kLanes, int kSteps>
GATED_OPS_INLINE float TreeSum(const float* values) {
  float lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = values[lane];
  for (int step = 1; step < kSteps; ++step) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += values[step * kLanes + lane];
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

}  // namespace paddle_gated_ops
