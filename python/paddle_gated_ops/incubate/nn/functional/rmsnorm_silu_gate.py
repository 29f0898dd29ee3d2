"""The backward of RMSNorm(x) * weight * SiLU(z) over 128 columns."""

import operator

from ...._graph import call_registered, check_bool, check_variables, in_graph_mode, refuse_buffers, unified
from ...._library import C
from ...._place import check_place

_NAME = "cake_rmsnorm_silu_gate_train_backward"
_OUTPUTS = {"grad_x": "bfloat16", "grad_z": "bfloat16", "grad_weight": "bfloat16"}


@unified
def cake_rmsnorm_silu_gate_train_backward(
    grad_out,
    x,
    z,
    weight,
    eps=1e-6,
    *,
    grad_x=None,
    grad_z=None,
    grad_weight=None,
    accumulate_grad_weight=False,
    compute_grad_weight=True,
    workspace=None,
):
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
        >>> print(grad_x.shape, grad_z.shape, grad_weight.shape)
        [64, 32, 128] [64, 32, 128] [128]

    Source: ``flashinfer.cake_rmsnorm_silu_gate_train.cake_rmsnorm_silu_gate_train_backward``.
    """
    inputs = {"grad_out": grad_out, "x": x, "z": z, "weight": weight}
    if in_graph_mode():
        check_variables(_NAME, inputs, ["bfloat16"] * 4)
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
        )
        if outputs is not None:
            return outputs  # None: DistTensors
    given = dict(
        grad_x=grad_x,
        grad_z=grad_z,
        grad_weight=grad_weight,
        accumulate_grad_weight=accumulate_grad_weight,
        workspace=workspace,
    )
    check_bool(_NAME, "accumulate_grad_weight", accumulate_grad_weight)
    check_bool(_NAME, "compute_grad_weight", compute_grad_weight)
    refuse_buffers(_NAME, given)
    attributes = {"eps": C.checked_eps(eps)}
    if compute_grad_weight:
        return call_registered("gated_" + _NAME, inputs, _OUTPUTS, attributes)
    outputs = {name: dtype for name, dtype in _OUTPUTS.items() if name != "grad_weight"}
    return (*call_registered(f"gated_{_NAME}_without_weight", inputs, outputs, attributes), None)


def cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows, place=None):
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
    function = _NAME + "_workspace_bytes"
    if isinstance(rows, bool):
        raise TypeError(f"{function}: rows must be an int, but is bool")
    try:
        rows = operator.index(rows)
    except TypeError:
        raise TypeError(f"{function}: rows must be an int, but is {type(rows).__name__}") from None
    if not 0 <= rows < 2**63:
        raise ValueError(f"{function}: rows must be from 0 to 2^63 - 1, but is {rows}")
    check_place(function, place)
    return C.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows)
