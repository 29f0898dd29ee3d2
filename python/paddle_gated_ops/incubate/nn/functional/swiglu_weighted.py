"""The backward of probability-weighted SwiGLU."""

from ...._graph import call_registered, check_variables, in_graph_mode, unified
from ...._library import C

_NAME = "fused_swiglu_weighted_bwd"
_OUTPUTS = {"do1": "bfloat16", "probs_grad": "float32", "o2_s": "bfloat16"}


@unified
def fused_swiglu_weighted_bwd(o1, do2_s, unzipped_probs, name=None):
    r"""The gradients of probability-weighted SwiGLU, and its output recomputed from the inputs.

    The forward of one row, with gate and up the halves of o1 and p the row's probability:

    .. math::
        o2_s = silu(gate) \cdot up \cdot p, \qquad silu(g) = g \cdot s, \quad s = 1 / (1 + e^{-g})

    and with d = do2_s, the gradient of the loss with respect to o2_s:

    .. math::
        do1_{gate} &= d \cdot p \cdot up \cdot s (1 + gate (1 - s)) \\
        do1_{up}   &= d \cdot p \cdot silu(gate) \\
        probs\_grad &= \textstyle\sum_i d_i \cdot silu(gate_i) \cdot up_i

    FP32 inside, one rounding to nearest even at each BF16 store; the sum over the row in FP32 trees and FP64. The same
    inputs give the same bits, whatever the strides, the batch, the stream or the number of threads. Rows are
    independent: NaN or Inf in a row stays there, and a finite row with p = 0 gets zeros for do1 and o2_s.

    Args:
        o1 (Tensor): bfloat16, [..., 2 * intermediate_size]; gate in the left half, up in the right half.
        do2_s (Tensor): bfloat16, [..., intermediate_size].
        unzipped_probs (Tensor): float32, o1's leading shape, or that shape and [1].
        name (str, optional): accepted for the documented signature, unused.

    All on one place, CPU or GPU. In eager mode any strides, read in place without a copy.

    Returns:
        tuple: do1 (bfloat16, o1's shape), probs_grad (float32, unzipped_probs' shape) and o2_s (bfloat16, do2_s's
        shape), with stop_gradient True. Empty inputs give empty outputs; rows of no columns have probs_grad 0.

    Raises:
        TypeError: an argument is no Tensor (in a static graph: no variable).
        ValueError: a dtype, shape or place other than these; nothing has been written then.

    Examples:
        >>> import paddle
        >>> import paddle_gated_ops.incubate.nn.functional as F
        >>> o1 = paddle.randn([32, 128, 4096]).astype('bfloat16')
        >>> do2_s = paddle.randn([32, 128, 2048]).astype('bfloat16')
        >>> expert_probs = paddle.rand([32, 128, 1])
        >>> do1, probs_grad, o2_s = F.fused_swiglu_weighted_bwd(o1, do2_s, expert_probs)
        >>> print(do1.shape, probs_grad.shape, o2_s.shape)
        [32, 128, 4096] [32, 128, 1] [32, 128, 2048]

    Source: ``paddle.incubate.nn.functional.fused_swiglu_weighted_bwd`` of Paddle 3.1 and newer, GPU builds.
    """
    inputs = {"o1": o1, "do2_s": do2_s, "unzipped_probs": unzipped_probs}
    if in_graph_mode():
        check_variables(_NAME, inputs, ("bfloat16", "bfloat16", "float32"))
    else:
        outputs = C.fused_swiglu_weighted_bwd(o1, do2_s, unzipped_probs)
        if outputs is not None:
            return outputs  # None: DistTensors
    return call_registered("gated_" + _NAME, inputs, _OUTPUTS)
