"""RMSNorm(x) * weight * SiLU(z) over 128 columns, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from .... import _amp
from ...._autograd import checked_main_grad, needs_node, refused_gradients, save_inputs, saved_inputs
from ...._checks import check_bool, check_int
from ...._dist import reduced, rows_are_sharded, with_fp32_gradient
from ...._graph import call_registered, check_dtype, check_variables, in_graph_mode, is_tensor, refuse_buffers, unified
from ...._library import C
from ...._place import check_place

if TYPE_CHECKING:
    from paddle._typing import PlaceLike

_FWD = "cake_rmsnorm_silu_gate"
_TRAIN_FWD = "cake_rmsnorm_silu_gate_train_forward"
_BWD = "cake_rmsnorm_silu_gate_train_backward"


@unified
def cake_rmsnorm_silu_gate(x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    r"""y = RMSNorm(x) * weight * SiLU(z), normalized over the last dimension of 128, differentiable in x, z and weight.

    .. math::
        rstd = 1 / \sqrt{mean(x^2) + eps}, \qquad y = silu(z) \cdot (x \cdot rstd) \cdot weight

    FP32 inside, one rounding to nearest even. Its gradient is ``cake_rmsnorm_silu_gate_train_backward``: the inputs alone
    are saved for it, and in eager mode gradients that nobody wants are not computed. In a graph all are.

    Where ``weight.main_grad`` (float32, [128]) exists when the backward runs, in eager mode, the weight's gradient is added
    to it, unrounded, and none is returned; then the hooks of ``weight._register_backward_hook`` run, where it has any. Those
    of ``weight.register_hook`` get no gradient to work on. In a graph main_grad is passed over. DataParallel does not
    reduce it.

    Args:
        x (Tensor): bfloat16, [..., 128].
        z (Tensor): bfloat16, [..., 128].
        weight (Tensor): bfloat16, [128].
        eps (float): finite, not negative, rounded to FP32.

    All on one place, CPU or GPU; any strides in eager mode. Where ``paddle.amp.auto_cast`` acts with bfloat16, float32
    inputs are cast to bfloat16; the gradient of a float32 weight is then the unrounded float32 sum, and its main_grad is the
    weight's own.

    As any ``PyLayer`` of Paddle up to 3.3, the node can run backward once only: a second backward through the same forward,
    also under retain_graph=True, ends the process. ``paddle.grad`` with respect to some of the trainable inputs needs
    stop_gradient=True on the others.

    Returns:
        Tensor: y, bfloat16, x's shape.

    Raises:
        TypeError: an argument is no Tensor, or eps no number.
        ValueError: a dtype, shape or place other than these, or auto_cast with float16; in its backward, a main_grad that
            is not float32 of the weight's shape.
        NotImplementedError: in its backward under create_graph=True, in eager mode. In a graph Paddle takes the gradient for
            a constant.

    Source: FlashInfer's ``cake_rmsnorm_silu_gate_train``, forward.
    """
    return rmsnorm_silu_gate(x, z, weight, eps, cast_weight=_amp.autocast_dtype() is not None)


@unified
def rmsnorm_silu_gate(x, z, weight, eps, cast_weight):
    """``cake_rmsnorm_silu_gate``, which casts a float32 weight where cast_weight says so, else refuses it."""
    x, z = _amp.cast_inputs(_FWD, {"x": (x, "bfloat16"), "z": (z, "bfloat16")})
    cast_weight = cast_weight and is_tensor(weight) and weight.dtype == paddle.float32
    if in_graph_mode():
        inputs = {"x": x, "z": z, "weight": weight}
        check_variables(_FWD, inputs, ["bfloat16", "bfloat16", "float32" if cast_weight else "bfloat16"])
        if not cast_weight:
            inputs["weight"] = with_fp32_gradient(weight, x, z)
        return _registered_fwd(inputs, eps)
    if needs_node(x, z, weight):
        # Before the PyLayer: Paddle's keep memory where their forward raises, and do not always name the argument.
        C.check_cake_rmsnorm_silu_gate(x, z, weight, eps, cast_weight)
        return _RmsNormSiluGate.apply(x, z, weight, eps, cast_weight)
    return _eager_fwd(x, z, weight, eps, cast_weight)


def _eager_fwd(x, z, weight, eps, cast_weight):
    if cast_weight:
        C.check_tensor(_FWD, "weight", weight)
        weight = weight.astype("bfloat16")
    output = C.cake_rmsnorm_silu_gate(_FWD, x, z, weight, eps, None)
    if output is None:  # DistTensors
        check_dtype(_FWD, "weight", weight, "bfloat16")  # the registered op takes FP32 too
        output = _registered_fwd({"x": x, "z": z, "weight": weight}, eps)
    return output


def _registered_fwd(inputs, eps):
    attributes = {"eps": C.checked_eps(_FWD, eps)}
    # The gradients of DistTensors are recorded by the PyLayer: the sum in weight's has to be reduced before it is rounded.
    return call_registered("gated_" + _FWD, inputs, {"y": "bfloat16"}, attributes, differentiable=in_graph_mode())[0]


class _RmsNormSiluGate(PyLayer):
    """With cast_weight, of a float32 weight: the gradient of a cast outside would be rounded to BF16, and main_grad, which
    belongs to the weight, not to its cast, would be passed over."""

    @staticmethod
    def forward(ctx, x, z, weight, eps, cast_weight):
        output = _eager_fwd(x, z, weight, eps, cast_weight)
        save_inputs(ctx, x=x, z=z, weight=weight)
        ctx.weight = weight  # has main_grad; what recompute saves in its place has not
        ctx.eps, ctx.cast_weight = eps, cast_weight
        ctx.wanted = [not tensor.stop_gradient for tensor in (x, z, weight)]
        return output

    @staticmethod
    def backward(ctx, grad_out):
        refused = refused_gradients(_FWD, ctx.wanted)
        if refused is not None:
            return refused
        x, z, weight = saved_inputs(ctx, _FWD)
        want_x, want_z, want_weight = ctx.wanted
        main_grad = checked_main_grad(_FWD, "weight", ctx.weight) if want_weight else None
        grad_weight = main_grad
        if ctx.cast_weight:
            if want_weight and main_grad is None:
                grad_weight = paddle.empty_like(weight)
            weight = weight.astype("bfloat16")
        gradients = C.cake_rmsnorm_silu_gate_train_backward(
            grad_out,
            x,
            z,
            weight,
            ctx.eps,
            None,
            None,
            grad_weight,
            main_grad is not None,
            want_weight,
            None,
            want_x,
            want_z,
        )
        if gradients is None:
            return _dist_gradients(grad_out, x, z, weight, ctx, main_grad)
        grad_x, grad_z, grad_weight = gradients
        # None for the weight: Paddle then runs its backward hooks once, as after a gradient of its own.
        return grad_x, grad_z, grad_weight if main_grad is None else None


def _dist_gradients(grad_out, x, z, weight, ctx, main_grad):
    """The gradients of DistTensors: None where none is wanted, and for a weight whose gradient went into main_grad."""
    inputs = {"grad_out": grad_out, "x": x, "z": z, "weight": weight}
    in_fp32 = ctx.cast_weight or main_grad is not None
    *gradients, grad_weight = _registered_bwd(inputs, ctx.eps, ctx.wanted[2], in_fp32)
    if main_grad is not None:
        main_grad.add_(grad_weight)
        grad_weight = None
    return (*(gradient if want else None for gradient, want in zip(gradients, ctx.wanted)), grad_weight)


def _registered_bwd(inputs, eps, compute_grad_weight=True, in_fp32=False):
    """The registered backward's grad_x, grad_z and grad_weight, or None; the last in FP32 or rounded to BF16."""
    attributes = {"eps": C.checked_eps(_BWD, eps)}
    outputs = {"grad_x": "bfloat16", "grad_z": "bfloat16"}
    if not compute_grad_weight:
        return (*call_registered(f"gated_{_BWD}_without_weight", inputs, outputs, attributes), None)
    split = rows_are_sharded(inputs["grad_out"], inputs["x"], inputs["z"])
    if not split and not in_fp32:
        return call_registered("gated_" + _BWD, inputs, {**outputs, "grad_weight": "bfloat16"}, attributes)
    inputs = {**inputs, "weight": inputs["weight"].astype("float32")}  # whose gradient is FP32
    *gradients, grad_weight = call_registered("gated_" + _BWD, inputs, {**outputs, "grad_weight": "float32"}, attributes)
    grad_weight = reduced(grad_weight)  # in FP32, and rounded once
    return (*gradients, grad_weight if in_fp32 else grad_weight.astype("bfloat16"))


def cake_rmsnorm_silu_gate_train_forward(
    x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None
) -> Tensor:
    """``cake_rmsnorm_silu_gate`` without autograd, into the caller's tensor where one is passed, in eager mode.

    Args:
        x, z, weight, eps: as ``cake_rmsnorm_silu_gate`` has them.
        out (Tensor, optional): receives y: bfloat16, x's shape, any strides. It may be exactly x's or z's memory (same
            pointer and strides), and else shares none with other arguments.

    Returns:
        Tensor: y: out where it was passed, else a new tensor with stop_gradient True.

    Raises:
        TypeError: an argument is no Tensor, or eps no number.
        ValueError: a dtype, shape or place other than these, forbidden sharing of memory, a DistTensor, static graph mode,
            or an out that is a leaf with stop_gradient=False while gradients are enabled; nothing has been written then.
    """
    if in_graph_mode():
        raise ValueError(f"{_TRAIN_FWD} is for eager mode: use {_FWD} in a static graph")
    output = C.cake_rmsnorm_silu_gate(_TRAIN_FWD, x, z, weight, eps, out)
    if output is None:
        raise ValueError(f"{_TRAIN_FWD} takes no DistTensor: use {_FWD}")
    return output


@unified
def cake_rmsnorm_silu_gate_train_backward(
    grad_out: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    grad_x: Tensor | None = None,
    grad_z: Tensor | None = None,
    grad_weight: Tensor | None = None,
    accumulate_grad_weight: bool = False,
    compute_grad_weight: bool = True,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""The gradients of y = RMSNorm(x) * weight * SiLU(z), normalized over the last dimension of 128.

    With rstd = 1 / sqrt(mean(x^2) + eps), n = x * rstd, s = sigmoid(z), dy = grad_out and a = dy * silu(z):

    .. math::
        grad_z &= dy \cdot (n \cdot weight) \cdot s (1 + z (1 - s)) \\
        grad_x &= rstd \cdot (a \cdot weight - n \cdot mean(a \cdot weight \cdot n)) \\
        grad\_weight &= \textstyle\sum_{rows} a \cdot n

    FP32 inside, one rounding to nearest even at each BF16 store. grad_weight sums at most 16 rows in FP32, the rest in
    FP64, in an order fixed by the number of rows, and is rounded once, from FP64 to its dtype. The same inputs give the
    same bits, whatever the strides, the stream or the number of threads; rows are independent but for grad_weight.

    Args:
        grad_out (Tensor): bfloat16, [..., 128].
        x (Tensor): bfloat16, [..., 128].
        z (Tensor): bfloat16, [..., 128].
        weight (Tensor): bfloat16, [128].
        eps (float): the forward's epsilon: finite, not negative, rounded to FP32.
        grad_x (Tensor, optional): receives the gradient: bfloat16, x's shape, any strides. It may be exactly grad_out's,
            x's or z's memory (same pointer and strides), and else shares none with other arguments.
        grad_z (Tensor, optional): likewise.
        grad_weight (Tensor, optional): receives the weight's gradient: bfloat16 or float32, [128], any stride.
        accumulate_grad_weight (bool): add to what grad_weight holds, before the one rounding. Needs grad_weight.
        compute_grad_weight (bool): False skips the weight's gradient and returns None for it; grad_weight and workspace
            are then checked and left alone.
        workspace (Tensor, optional): float32, contiguous, at least
            ``cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows)`` bytes, whatever it holds. Allocated where it
            is left out.

    All on one place, CPU or GPU. In eager mode any strides, read and written in place without a copy. In a static graph
    the four outputs and buffers must be left out.

    Returns:
        tuple: grad_x, grad_z (bfloat16, x's shape) and grad_weight (bfloat16, [128], or None). Each is the caller's own
        tensor where one was passed; new ones have stop_gradient True. No rows give grad_weight 0.

    Raises:
        TypeError: an argument is no Tensor, a flag no bool, eps no number.
        ValueError: a dtype, shape, place or layout other than these, forbidden sharing of memory, a passed output that
            is a leaf with stop_gradient=False while gradients are enabled, accumulate_grad_weight without grad_weight or
            with compute_grad_weight=False; nothing has been written then.

    Examples:
        >>> import paddle
        >>> import paddle_gated_ops.incubate.nn.functional as F
        >>> grad_out, x, z = (paddle.randn([64, 32, 128]).astype('bfloat16') for _ in range(3))
        >>> weight = paddle.ones([128]).astype('bfloat16')
        >>> grad_x, grad_z, grad_weight = F.cake_rmsnorm_silu_gate_train_backward(grad_out, x, z, weight, eps=1e-6)
        >>> print(list(grad_x.shape), list(grad_z.shape), list(grad_weight.shape))
        [64, 32, 128] [64, 32, 128] [128]

    Source: ``flashinfer.cake_rmsnorm_silu_gate_train.cake_rmsnorm_silu_gate_train_backward``.
    """
    inputs = {"grad_out": grad_out, "x": x, "z": z, "weight": weight}
    if in_graph_mode():
        check_variables(_BWD, inputs, ["bfloat16"] * 4)
    else:
        outputs = C.cake_rmsnorm_silu_gate_train_backward(
            grad_out,
            x,
            z,
            weight,
            eps,
            grad_x,
            grad_z,
            grad_weight,
            accumulate_grad_weight,
            compute_grad_weight,
            workspace,
            True,
            True,
        )
        if outputs is not None:
            return outputs
        check_dtype(_BWD, "weight", weight, "bfloat16")  # DistTensors, and the registered op takes FP32 too
    given = dict(
        grad_x=grad_x,
        grad_z=grad_z,
        grad_weight=grad_weight,
        accumulate_grad_weight=accumulate_grad_weight,
        workspace=workspace,
    )
    check_bool(_BWD, "accumulate_grad_weight", accumulate_grad_weight)
    check_bool(_BWD, "compute_grad_weight", compute_grad_weight)
    refuse_buffers(_BWD, given)
    return _registered_bwd(inputs, eps, compute_grad_weight)


def cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows: int, place: PlaceLike | None = None) -> int:
    """The bytes of a workspace for ``cake_rmsnorm_silu_gate_train_backward``.

    Args:
        rows (int): the product of the leading dimensions, not negative.
        place (Place|str, optional): where the call runs: a Paddle place, a string such as 'cpu' or 'gpu:0', or None for
            the current one.

    Returns:
        int: bytes, a multiple of 4. It never falls as rows grow, so a workspace for more rows serves fewer.

    Raises:
        TypeError: rows is no integer, or place is none of these.
        ValueError: rows is negative, or place is neither the CPU nor a GPU that this build serves.
    """
    function = _BWD + "_workspace_bytes"
    rows = check_int(function, "rows", rows)
    if not 0 <= rows < 2**63:
        raise ValueError(f"{function}: rows must be from 0 to 2^63 - 1, but is {rows}")
    check_place(function, place)
    return C.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows)
