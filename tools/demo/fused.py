"""Weighted SwiGLU with its down projection, and gated RMSNorm, on the fused backward ops: the PyLayers to copy.

Both keep only their inputs for the backward pass. All their tensors must need a gradient; for one that does not,
backward has to return None (and ``compute_grad_weight=False`` saves the norm weight's).
"""

import paddle
import paddle.nn.functional as F
from grouped import grouped_matmul, grouped_weight_grad
from paddle.autograd import PyLayer
from paddle_gated_ops.incubate.nn.functional import cake_rmsnorm_silu_gate_train_backward, fused_swiglu_weighted_bwd


class WeightedSwiGLUDown(PyLayer):
    """o2_s @ down_proj, each expert's rows with its own matrix, where o2_s = silu(gate) * up * prob.

    o1: BF16 [rows, 2I], gate in the left half and up in the right, rows sorted by expert. probs: FP32 [rows, 1].
    down_proj: [experts, I, hidden]. counts: list of each expert's number of rows. Returns [rows, hidden] in down_proj's
    dtype. The gradient of down_proj needs o2_s, which the op recomputes, so o2_s is not kept.
    """

    @staticmethod
    def forward(ctx, o1, probs, down_proj, counts):
        ctx.save_for_backward(o1, probs, down_proj)
        ctx.counts = counts
        gate, up = o1.astype("float32").chunk(2, axis=-1)
        o2_s = (F.silu(gate) * up * probs).astype("bfloat16")
        return grouped_matmul(o2_s.astype(down_proj.dtype), down_proj, counts)

    @staticmethod
    def backward(ctx, grad_out):
        o1, probs, down_proj = ctx.saved_tensor()
        do2_s = grouped_matmul(grad_out, down_proj, ctx.counts, transpose=True).astype("bfloat16")
        do1, probs_grad, o2_s = fused_swiglu_weighted_bwd(o1, do2_s, probs)
        return do1, probs_grad, grouped_weight_grad(o2_s.astype(grad_out.dtype), grad_out, ctx.counts)


class GatedRMSNorm(PyLayer):
    """RMSNorm(x) * weight * silu(z), normalized over the last dimension.

    x, z: BF16 [..., 128]. weight: [128] in BF16, or in FP32 and rounded to BF16 here; its gradient comes in its own
    dtype, rounded once. eps: float. Returns BF16 [..., 128].
    """

    @staticmethod
    def forward(ctx, x, z, weight, eps):
        ctx.save_for_backward(x, z, weight)
        ctx.eps = eps
        x, z, weight = x.astype("float32"), z.astype("float32"), weight.astype("bfloat16").astype("float32")
        rstd = paddle.rsqrt(x.square().mean(axis=-1, keepdim=True) + eps)
        return (x * rstd * weight * F.silu(z)).astype("bfloat16")

    @staticmethod
    def backward(ctx, grad_out):
        x, z, weight = ctx.saved_tensor()
        grad_weight = paddle.empty(weight.shape, weight.dtype)
        return cake_rmsnorm_silu_gate_train_backward(
            grad_out, x, z, weight.astype("bfloat16"), ctx.eps, grad_weight=grad_weight
        )


# The rest of the model is in FP32 (Paddle's CPU build has no BF16 matrix product), with casts at the borders.


def weighted_swiglu_down(o1, probs, down_proj, counts):
    return WeightedSwiGLUDown.apply(o1.astype("bfloat16"), probs, down_proj, counts)


def gated_rms_norm(x, z, weight, eps):
    return GatedRMSNorm.apply(x.astype("bfloat16"), z.astype("bfloat16"), weight, eps).astype("float32")
