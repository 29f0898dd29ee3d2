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
  float gated;      // a = dy * silu(z); a * n is this row's share of d loss / d weight
  float weighted;   // c = a * w: the gradient of n; the sum of c * n over the row takes it off the direction of x
  float gate_grad;  // d loss / d z
};

template <bool kFma = false>
GATED_OPS_INLINE GatedNormTerms GatedNormBackward(float output_grad, float n, float gate, float weight, float gate_sigmoid) {
  const float s = gate_sigmoid;
  GatedNormTerms terms;
  terms.gated = (s * gate) * output_grad;
  terms.weighted = terms.gated * weight;
  terms.gate_grad = ((SiluDerivative<kFma>(gate, s) * output_grad) * n) * weight;
  return terms;
}
GATED_OPS_INLINE GatedNormTerms GatedNormBackward(float output_grad, float n, float gate, float weight) {
  return GatedNormBackward(output_grad, n, gate, weight, Sigmoid(gate));
}

// d loss / d x. Never with rstd^3, which leaves FP32's range long before the result does.
template <bool kFma = false>
GATED_OPS_INLINE float GatedNormInputGrad(float weighted, float n, float mean_projection, float rstd) {
  return rstd * MulAdd<kFma>(-n, mean_projection, weighted);
}

}  // namespace paddle_gated_ops
