"""Probability-weighted SwiGLU, forward and backward."""

from __future__ import annotations

from paddle import Tensor
from paddle.autograd import PyLayer

from ...._amp import cast_inputs
from ...._autograd import needs_node, refused_gradients, save_inputs, saved_inputs
from ...._graph import call_registered, check_variables, in_graph_mode, unified
from ...._library import C

_FWD = "fused_swiglu_weighted"
_BWD = "fused_swiglu_weighted_bwd"
_CLAMP_BWD = "fused_swiglu_weighted_clamp_bwd"
_BWD_OUT = "fused_swiglu_weighted_bwd_out"


@unified
def fused_swiglu_weighted(
    o1: Tensor, unzipped_probs: Tensor, clamp_value: float | None = None, name: str | None = None
) -> Tensor:
    r"""Probability-weighted SwiGLU in one kernel, differentiable in both inputs.

    With gate and up the halves of o1, and p the row's probability:

    .. math::
        o2_s = silu(gate) \cdot up \cdot p, \qquad silu(g) = g / (1 + e^{-g})

    With clamp_value c, gate becomes min(gate, c) and up becomes clip(up, -c, c) first; their gradients pass at equality and
    are zero beyond. FP32 inside, one rounding to nearest even. Its gradient is ``fused_swiglu_weighted_bwd``: the inputs
    alone are saved for it, and in eager mode gradients that nobody wants are not computed. In a graph all are.

    Args:
        o1 (Tensor): bfloat16, [..., 2 * intermediate_size]; gate in the left half, up in the right half.
        unzipped_probs (Tensor): float32, o1's leading shape, or that shape and [1].
        clamp_value (float, optional): finite and above 0; None clamps nothing.
        name (str, optional): accepted as Paddle's functions do, unused.

    All on one place, CPU or GPU; any strides in eager mode. Where ``paddle.amp.auto_cast`` acts with bfloat16, a float32 o1
    is cast to bfloat16 and bfloat16 probabilities to float32.

    As any ``PyLayer`` of Paddle up to 3.3, the node can run backward once only: a second backward through the same forward,
    with ``retain_graph`` too, ends the process; and ``paddle.grad`` of one of several trainable inputs needs
    stop_gradient=True on the others.

    Returns:
        Tensor: o2_s, bfloat16, [..., intermediate_size].

    Raises:
        TypeError: an argument is no Tensor, or clamp_value no number.
        ValueError: a dtype, shape or place other than these, a clamp_value that is not finite and above 0, or auto_cast with
            float16.
        NotImplementedError: in its backward under create_graph=True, in eager mode. In a graph Paddle takes the gradient for
            a constant.

    Source: the SwiGLU of Paddle's ``fused_swiglu_weighted_bwd``, forward.
    """
    o1, unzipped_probs = cast_inputs(_FWD, {"o1": (o1, "bfloat16"), "unzipped_probs": (unzipped_probs, "float32")})
    inputs = {"o1": o1, "unzipped_probs": unzipped_probs}
    if in_graph_mode():
        check_variables(_FWD, inputs, ("bfloat16", "float32"))
    elif not needs_node(o1, unzipped_probs):
        output = C.fused_swiglu_weighted(o1, unzipped_probs, clamp_value)
        if output is not None:
            return output  # None: DistTensors
    else:
        # Before the PyLayer: Paddle's keep memory where their forward raises, and do not always name the argument.
        C.check_fused_swiglu_weighted(o1, unzipped_probs, clamp_value)
        return _FusedSwigluWeighted.apply(o1, unzipped_probs, clamp_value)
    return _registered_fwd(inputs, clamp_value)


def _registered_fwd(inputs, clamp_value):
    attributes = {"clamp_value": C.checked_clamp_value(_FWD, clamp_value)}
    # The gradients of DistTensors are recorded by the PyLayer.
    return call_registered("gated_" + _FWD, inputs, {"o2_s": "bfloat16"}, attributes, differentiable=in_graph_mode())[0]


class _FusedSwigluWeighted(PyLayer):
    @staticmethod
    def forward(ctx, o1, unzipped_probs, clamp_value):
        output = C.fused_swiglu_weighted(o1, unzipped_probs, clamp_value)
        if output is None:  # DistTensors
            output = _registered_fwd({"o1": o1, "unzipped_probs": unzipped_probs}, clamp_value)
        save_inputs(ctx, o1=o1, unzipped_probs=unzipped_probs)
        ctx.clamp_value = clamp_value
        ctx.wanted = (not o1.stop_gradient, not unzipped_probs.stop_gradient)
        return output

    @staticmethod
    def backward(ctx, do2_s):
        refused = refused_gradients(_FWD, ctx.wanted)
        if refused is not None:
            return refused
        o1, unzipped_probs = saved_inputs(ctx, _FWD)
        buffers = (None, None, None)
        gradients = C.fused_swiglu_weighted_bwd_out(
            _FWD, o1, do2_s, unzipped_probs, ctx.clamp_value, *buffers, *ctx.wanted, False
        )
        if gradients is None:  # DistTensors
            clamp_value = C.checked_clamp_value(_FWD, ctx.clamp_value)
            gradients = _registered_bwd(o1, do2_s, unzipped_probs, clamp_value)
        return tuple(gradient if wanted else None for gradient, wanted in zip(gradients, ctx.wanted))


@unified
def fused_swiglu_weighted_bwd(
    o1: Tensor, do2_s: Tensor, unzipped_probs: Tensor, name: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
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
        >>> print(list(do1.shape), list(probs_grad.shape), list(o2_s.shape))
        [32, 128, 4096] [32, 128, 1] [32, 128, 2048]

    Source: ``paddle.incubate.nn.functional.fused_swiglu_weighted_bwd`` of Paddle 3.1 and newer, GPU builds.
    """
    if not in_graph_mode():
        outputs = C.fused_swiglu_weighted_bwd(o1, do2_s, unzipped_probs)
        if outputs is not None:
            return outputs  # None: DistTensors
    return _registered_bwd(o1, do2_s, unzipped_probs, 0.0)


@unified
def fused_swiglu_weighted_clamp_bwd(
    o1: Tensor, do2_s: Tensor, unzipped_probs: Tensor, clamp_value: float, name: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    r"""``fused_swiglu_weighted_bwd`` of the clamped form.

    The forward has gate' = min(gate, c) in place of gate and up' = clip(up, -c, c) in place of up, c = clamp_value. So
    have the formulas of ``fused_swiglu_weighted_bwd``, and

    .. math::
        do1_{gate} = 0 \text{ where } gate > c, \qquad do1_{up} = 0 \text{ where } |up| > c

    The gradient passes at equality. NaN is not clamped.

    Args:
        o1, do2_s, unzipped_probs, name: as ``fused_swiglu_weighted_bwd`` has them.
        clamp_value (float): finite and above 0, rounded to FP32.

    Returns:
        tuple: do1, probs_grad and o2_s, as ``fused_swiglu_weighted_bwd`` returns them.

    Raises:
        TypeError: an argument is no Tensor, or clamp_value no number.
        ValueError: as ``fused_swiglu_weighted_bwd``, and where clamp_value is not finite and above 0.

    Source: the clamped weighted SwiGLU of newer Paddle code.
    """
    if clamp_value is None:
        raise TypeError(f"{_CLAMP_BWD}: clamp_value must be a float, but is NoneType")
    if not in_graph_mode():
        buffers = (None, None, None)
        outputs = C.fused_swiglu_weighted_bwd_out(
            _CLAMP_BWD, o1, do2_s, unzipped_probs, clamp_value, *buffers, True, True, True
        )
        if outputs is not None:
            return outputs  # None: DistTensors
    return _registered_bwd(o1, do2_s, unzipped_probs, C.checked_clamp_value(_CLAMP_BWD, clamp_value))


def _registered_bwd(o1, do2_s, unzipped_probs, clamp_value):
    inputs = {"o1": o1, "do2_s": do2_s, "unzipped_probs": unzipped_probs}
    if in_graph_mode():
        check_variables(_BWD, inputs, ("bfloat16", "bfloat16", "float32"))
    outputs = {"do1": "bfloat16", "probs_grad": "float32", "o2_s": "bfloat16"}
    return call_registered("gated_" + _BWD, inputs, outputs, {"clamp_value": clamp_value})


def fused_swiglu_weighted_bwd_out(
    o1: Tensor,
    do2_s: Tensor,
    unzipped_probs: Tensor,
    *,
    do1: Tensor | None = None,
    probs_grad: Tensor | None = None,
    o2_s: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``fused_swiglu_weighted_bwd`` into the caller's tensors, in eager mode.

    Args:
        o1, do2_s, unzipped_probs (Tensor): as ``fused_swiglu_weighted_bwd`` has them.
        do1 (Tensor, optional): receives do1: bfloat16, o1's shape, any strides. It may be exactly o1's memory (same pointer
            and strides), and else shares none with other arguments.
        probs_grad (Tensor, optional): receives probs_grad: float32, unzipped_probs' shape, any strides. It shares memory
            with no other argument.
        o2_s (Tensor, optional): receives o2_s: bfloat16, do2_s's shape, any strides. It may be exactly do2_s's memory, and
            else shares none with other arguments.

    With do1 in o1's memory and o2_s in do2_s's, an expert layer's backward needs no memory for either.

    Returns:
        tuple: do1, probs_grad and o2_s: the caller's own tensors where they were passed, else new ones.

    Raises:
        TypeError: an argument is no Tensor.
        ValueError: a dtype, shape or place other than these, forbidden sharing of memory, a DistTensor, static graph mode,
            or an output that is a leaf with stop_gradient=False while gradients are enabled; nothing has been written then.
    """
    if in_graph_mode():
        raise ValueError(f"{_BWD_OUT} writes into tensors, which a static graph has not: use {_BWD} there")
    outputs = C.fused_swiglu_weighted_bwd_out(
        _BWD_OUT, o1, do2_s, unzipped_probs, None, do1, probs_grad, o2_s, True, True, True
    )
    if outputs is None:
        raise ValueError(f"{_BWD_OUT} takes no DistTensor: use {_BWD}")
    return outputs
