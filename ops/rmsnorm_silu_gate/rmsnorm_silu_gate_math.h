// Gated RMSNorm of one element, forward and backward, host and device. README.md has the derivation.
#pragma once

#include "common/numerics.h"

namespace paddle_gated_ops {

// A loop that has the sigmoids of the gates at hand passes them as gate_sigmoid.
//
// n = x * rstd. The small factor (sigmoid) comes first and one factor follows at a time: sigmoid = 0 meets no Inf, which
// n * weight may be.
GATED_OPS_INLINE float GatedNormForward(float n, float gate, float weight, float gate_sigmoid) {
  return ((gate_sigmoid * gate) * n) * weight;
}
GATED_OPS_INLINE float GatedNormForward(float n, float gate, float weight) {
  return GatedNormForward(n, gate, weight, Sigmoid(gate));
}

// What one element gives before its row's second sum is known.
struct GatedNormTerms {
  float weighted;     // c = a * w with a = dy * silu(z): the gradient of the normalized x
  float projection;   // c * n: its sum over the row takes the gradient off the direction of x
  float gate_grad;    // d loss / d z
  float weight_term;  // a * n: this row's share of d loss / d weight
};

GATED_OPS_INLINE GatedNormTerms GatedNormBackward(float output_grad, float n, float gate, float weight, float gate_sigmoid) {
  const float s = gate_sigmoid;
  const float a = (s * gate) * output_grad;
  GatedNormTerms terms;
  terms.weighted = a * weight;
  terms.projection = terms.weighted * n;
  terms.gate_grad = ((SiluDerivative(gate, s) * output_grad) * n) * weight;
  terms.weight_term = a * n;
  return terms;
}
GATED_OPS_INLINE GatedNormTerms GatedNormBackward(float output_grad, float n, float gate, float weight) {
  return GatedNormBackward(output_grad, n, gate, weight, Sigmoid(gate));
}

// d loss / d x. Never with rstd^3, which leaves FP32's range long before the result does.
GATED_OPS_INLINE float GatedNormInputGrad(float weighted, float n, float mean_projection, float rstd) {
  return rstd * (weighted - n * mean_projection);
}

}  // namespace paddle_gated_ops
