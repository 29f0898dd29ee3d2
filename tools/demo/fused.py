"""The experts and the norm from the library: one autograd node each, on the fused ops.

The rest of the model is in FP32. The experts' products are too, as their weights are (Paddle's CPU build has no BF16
product); the library casts at the activation's borders. The norm takes BF16, so its casts stand here.
"""

from paddle_gated_ops.incubate.nn import RMSNormSiLUGate, WeightedSwiGLUExperts

Experts = WeightedSwiGLUExperts


class GatedRMSNorm(RMSNormSiLUGate):
    """RMSNormSiLUGate in an FP32 model."""

    def forward(self, x, z):
        return super().forward(x.astype("bfloat16"), z.astype("bfloat16")).astype("float32")
