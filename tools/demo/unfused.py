"""The two functions of ``fused`` from Paddle's own, in FP32 throughout and with Paddle's own gradients."""

import paddle
import paddle.nn.functional as F
from grouped import grouped_matmul


def weighted_swiglu_down(o1, probs, down_proj, counts):
    gate, up = o1.chunk(2, axis=-1)
    return grouped_matmul(F.silu(gate) * up * probs, down_proj, counts)


def gated_rms_norm(x, z, weight, eps):
    rstd = paddle.rsqrt(x.square().mean(axis=-1, keepdim=True) + eps)
    return x * rstd * weight * F.silu(z)
