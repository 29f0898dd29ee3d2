// The weighted SwiGLU backward of one element, host and device. README.md has the derivation.
#pragma once

#include "common/numerics.h"

namespace paddle_gated_ops {

struct SwigluWeightedGrads {
  float gate_grad;   // d loss / d gate
  float up_grad;     // d loss / d up
  float output;      // the forward's output, recomputed
  float probs_term;  // this element's share of d loss / d prob
};

// The small factor first, then prob, then the rest: sigmoid = 0 meets no Inf, and prob = 0 makes exact zeros.
GATED_OPS_INLINE SwigluWeightedGrads SwigluWeightedBackward(float gate, float up, float output_grad, float prob) {
  const float s = Sigmoid(gate);
  const float silu = s * gate;
  const float weighted_silu = silu * prob;
  SwigluWeightedGrads grads;
  grads.gate_grad = ((SiluDerivative(gate, s) * prob) * output_grad) * up;
  grads.up_grad = weighted_silu * output_grad;
  grads.output = weighted_silu * up;
  grads.probs_term = (silu * output_grad) * up;
  return grads;
}

}  // namespace paddle_gated_ops
