// Weighted SwiGLU of one element, forward and backward, host and device. README.md has the derivation.
#pragma once

#include "common/numerics.h"

namespace paddle_gated_ops {

// A loop that has the sigmoids of the clamped gates at hand passes them as gate_sigmoid.
//
// The clamped form: gate to at most `clamp`, up to at most that in magnitude. NaN passes, as a comparison with it is false.
template <bool kClamp>
GATED_OPS_INLINE float ClampGate(float gate, float clamp) {
  return kClamp && gate > clamp ? clamp : gate;
}
template <bool kClamp>
GATED_OPS_INLINE float ClampUp(float up, float clamp) {
  return !kClamp ? up : up > clamp ? clamp : up < -clamp ? -clamp : up;
}

// The small factor first, then prob, then the rest: sigmoid = 0 meets no Inf, and prob = 0 makes an exact zero.
template <bool kClamp>
GATED_OPS_INLINE float SwigluWeightedForward(float gate, float up, float prob, float clamp, float gate_sigmoid) {
  return ((gate_sigmoid * ClampGate<kClamp>(gate, clamp)) * prob) * ClampUp<kClamp>(up, clamp);
}
template <bool kClamp>
GATED_OPS_INLINE float SwigluWeightedForward(float gate, float up, float prob, float clamp) {
  return SwigluWeightedForward<kClamp>(gate, up, prob, clamp, Sigmoid(ClampGate<kClamp>(gate, clamp)));
}

struct SwigluWeightedGrads {
  float gate_grad;   // d loss / d gate
  float up_grad;     // d loss / d up
  float output;      // the forward's output, recomputed
  float probs_term;  // this element's share of d loss / d prob
};

template <bool kClamp, bool kFma = false>
GATED_OPS_INLINE SwigluWeightedGrads SwigluWeightedBackward(float gate, float up, float output_grad, float prob, float clamp,
                                                            float gate_sigmoid) {
  const float g = ClampGate<kClamp>(gate, clamp), u = ClampUp<kClamp>(up, clamp);
  const float s = gate_sigmoid;
  const float silu = s * g;
  const float weighted_silu = silu * prob;
  const float gate_grad = ((SiluDerivative<kFma>(g, s) * prob) * output_grad) * u;
  const float up_grad = weighted_silu * output_grad;
  SwigluWeightedGrads grads;
  // Nothing passes beyond the clamp; at equality all does.
  grads.gate_grad = kClamp && gate > clamp ? 0.0f : gate_grad;
  grads.up_grad = kClamp && (up > clamp || up < -clamp) ? 0.0f : up_grad;
  grads.output = weighted_silu * u;
  grads.probs_term = (silu * output_grad) * u;
  return grads;
}
template <bool kClamp>
GATED_OPS_INLINE SwigluWeightedGrads SwigluWeightedBackward(float gate, float up, float output_grad, float prob,
                                                            float clamp) {
  return SwigluWeightedBackward<kClamp>(gate, up, output_grad, prob, clamp, Sigmoid(ClampGate<kClamp>(gate, clamp)));
}

}  // namespace paddle_gated_ops
