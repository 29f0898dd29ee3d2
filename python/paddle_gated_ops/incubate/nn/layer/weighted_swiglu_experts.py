"""The experts of a mixture-of-experts layer, ERNIE 4.5's and DeepSeek-V3's."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.nn import Layer
from paddle.nn.initializer import XavierUniform

from ...._amp import autocast_dtype, cast_inputs
from ...._autograd import checked_main_grad, needs_node, refused_gradients, save_inputs, saved_inputs
from ...._checks import check_int
from ...._graph import in_graph_mode, is_tensor, unified
from ...._grouped import add_grouped_weight_grad, cast, grouped_matmul, grouped_matmul_in_graph, grouped_weight_grad
from ...._library import C
from ..functional import fused_swiglu_weighted
from ._weight_attr import checked_weight_attr

if TYPE_CHECKING:
    from paddle._typing import ParamAttrLike

_NAME = "WeightedSwiGLUExperts"
_INTEGERS = (paddle.uint8, paddle.int8, paddle.int16, paddle.int32, paddle.int64)


class WeightedSwiGLUExperts(Layer):
    r"""Feed-forward experts with probability-weighted SwiGLU, for tokens that are sorted by expert.

    For the tokens x of expert e, with probabilities p:

    .. math::
        o1 = x \cdot up\_gate\_proj[e], \qquad o2_s = silu(gate) \cdot up \cdot p, \qquad y = o2_s \cdot down\_proj[e]

    with gate and up the left and right half of o1, which is rounded to BF16 as o2_s is. The activation is
    ``functional.fused_swiglu_weighted``, its gradient ``functional.fused_swiglu_weighted_bwd``.

    Memory: in eager mode the layer is one autograd node. It keeps tokens, probabilities, o1 and the weights. o2_s, which the
    gradient of down_proj needs, is taken from the backward op, into the memory of its own gradient; o1's gradient goes into
    o1's memory. Gradients that nobody wants are not computed.

    Precision: the products run in the weights' dtype. On CPU, where Paddle has no BF16 product, that is float32, with casts
    at the activation's borders. Where ``paddle.amp.auto_cast`` acts with bfloat16, they run in BF16 whatever the weights
    are.

    Where ``up_gate_proj.main_grad`` or ``down_proj.main_grad`` (float32, the weight's shape) exists when the backward runs,
    in eager mode, the gradient is added to it in place, the weight's ``grad`` stays as it is, and the hooks of its
    ``_register_backward_hook`` run; those of its ``register_hook`` get no gradient to work on. DataParallel does not reduce
    main_grad.

    In a static graph and for DistTensors the layer is made of Paddle's products and the registered forward op, and main_grad
    is passed over. Under ``paddle.jit.to_static`` each new tokens_per_expert makes a new graph: where the counts change with
    every step, keep the layer out of the graph, or train in eager mode.

    As any ``PyLayer`` of Paddle up to 3.3, the node can run backward once only: a second backward through the same forward,
    also under retain_graph=True, ends the process. ``paddle.grad`` with respect to some of its trainable inputs needs
    stop_gradient=True on the others.

    Args:
        num_experts (int): the number of experts, 1 or more.
        hidden_size (int): the size of a token, 1 or more.
        intermediate_size (int): the size of gate, and of up, 1 or more.
        weight_attr (ParamAttr, optional): of both weights, as in ``paddle.nn.Linear``; a name in it is followed by
            ``_up_gate_proj`` and ``_down_proj``. By default each expert's matrices are drawn as ``paddle.nn.Linear``'s are
            (XavierUniform), in ``paddle.get_default_dtype()``.

    Attributes:
        up_gate_proj (Parameter): [num_experts, hidden_size, 2 * intermediate_size], gate in the left half: ERNIE 4.5's
            ``experts.<e>.up_gate_proj.weight`` one behind the other.
        down_proj (Parameter): [num_experts, intermediate_size, hidden_size], likewise.

    Shape:
        - tokens: the weights' dtype, [rows, hidden_size]: a row for each choice of each token, sorted by expert.
        - unzipped_probs: float32, [rows] or [rows, 1].
        - tokens_per_expert: a list, tuple or np.ndarray of num_experts ints, or an integer tensor on the CPU, of one
          dimension (in a static graph a list or tuple alone): the number of rows of each expert, 0 for some, rows in all.
        - output: the products' dtype, [rows, hidden_size].

    Raises:
        TypeError: a size is no int, weight_attr is none; in a call, an argument is no Tensor, or tokens_per_expert none of
            these.
        ValueError: a size is below 1, weight_attr is False; in a call, a dtype, shape or place other than these, counts that
            are negative or do not add up to rows, bfloat16 weights on the CPU, or auto_cast with float16; in its backward,
            a main_grad that is not float32 of the weight's shape.
        NotImplementedError: in its backward under create_graph=True, in eager mode. In a graph Paddle takes the gradient for
            a constant.

    Examples:
        >>> import paddle
        >>> from paddle_gated_ops.incubate.nn import WeightedSwiGLUExperts
        >>> experts = WeightedSwiGLUExperts(num_experts=4, hidden_size=64, intermediate_size=96)
        >>> tokens, probs = paddle.randn([10, 64]), paddle.rand([10])
        >>> y = experts(tokens, probs, [3, 0, 5, 2])
        >>> print(list(y.shape))
        [10, 64]
    """

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, weight_attr: ParamAttrLike | None = None
    ) -> None:
        super().__init__()
        self._num_experts = _checked_size("num_experts", num_experts)
        self._hidden_size = _checked_size("hidden_size", hidden_size)
        self._intermediate_size = _checked_size("intermediate_size", intermediate_size)
        weight_attr = checked_weight_attr(_NAME, weight_attr)
        self.up_gate_proj = self._weight("up_gate_proj", self._hidden_size, 2 * self._intermediate_size, weight_attr)
        self.down_proj = self._weight("down_proj", self._intermediate_size, self._hidden_size, weight_attr)

    def _weight(self, name, fan_in, fan_out, weight_attr):
        attr = copy.deepcopy(weight_attr)
        if attr.name is not None:  # which two parameters cannot share
            attr.name = f"{attr.name}_{name}"
        # Paddle would take the fans of three dimensions for a convolution's.
        initializer = XavierUniform(fan_in=fan_in, fan_out=fan_out)
        return self.create_parameter([self._num_experts, fan_in, fan_out], attr=attr, default_initializer=initializer)

    def forward(
        self, tokens: Tensor, unzipped_probs: Tensor, tokens_per_expert: Sequence[int] | np.ndarray | Tensor
    ) -> Tensor:
        # Here, outside of the unified function, to_static(full_graph=False) of 3.3 can read a tensor.
        if isinstance(tokens_per_expert, paddle.Tensor):
            tokens_per_expert = _ints_of(tokens_per_expert)
        return _weighted_swiglu_experts(tokens, unzipped_probs, self.up_gate_proj, self.down_proj, tokens_per_expert)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self._num_experts}, hidden_size={self._hidden_size}, "
            f"intermediate_size={self._intermediate_size}, dtype={self.up_gate_proj.dtype}"
        )


def _checked_size(name, value):
    size = check_int(_NAME, name, value)
    if size < 1:
        raise ValueError(f"{_NAME}: {name} must be 1 or more, but is {size}")
    return size


@unified
def _weighted_swiglu_experts(tokens, unzipped_probs, up_gate_proj, down_proj, tokens_per_expert):
    unzipped_probs = cast_inputs(_NAME, {"unzipped_probs": (unzipped_probs, "float32")})[0]
    mixed = autocast_dtype() is not None
    dtype = paddle.bfloat16 if mixed else up_gate_proj.dtype
    _check_tensors(tokens, unzipped_probs, up_gate_proj, down_proj, mixed)
    counts = _checked_counts(tokens_per_expert, up_gate_proj.shape[0], tokens.shape[0])

    tensors = tokens, unzipped_probs, up_gate_proj, down_proj
    if in_graph_mode() or C.any_dist(*tensors):
        o1 = cast(grouped_matmul_in_graph(cast(tokens, dtype), up_gate_proj, counts), paddle.bfloat16)
        o2_s = fused_swiglu_weighted(o1, unzipped_probs)
        return grouped_matmul_in_graph(cast(o2_s, dtype), down_proj, counts)
    if dtype == paddle.bfloat16 and not _has_bf16_matmul(tokens.place):
        raise ValueError(f"{_NAME}: the products must be in float32 on the CPU, where Paddle has none in bfloat16")
    if needs_node(*tensors):
        return _Node.apply(*tensors, counts, dtype)
    o2_s = C.fused_swiglu_weighted(_up(tokens, up_gate_proj, counts, dtype), unzipped_probs, None)
    return _down(o2_s, down_proj, counts, dtype)


def _has_bf16_matmul(place):
    return not place.is_cpu_place()


def _up(tokens, up_gate_proj, counts, dtype):
    return cast(grouped_matmul(cast(tokens, dtype), up_gate_proj, counts), paddle.bfloat16)


def _down(o2_s, down_proj, counts, dtype):
    return grouped_matmul(cast(o2_s, dtype), down_proj, counts)


class _Node(PyLayer):
    @staticmethod
    def forward(ctx, tokens, unzipped_probs, up_gate_proj, down_proj, counts, dtype):
        tensors = tokens, unzipped_probs, up_gate_proj, down_proj
        o1 = _up(tokens, up_gate_proj, counts, dtype)
        output = _down(C.fused_swiglu_weighted(o1, unzipped_probs, None), down_proj, counts, dtype)
        inputs = dict(tokens=tokens, unzipped_probs=unzipped_probs, up_gate_proj=up_gate_proj, down_proj=down_proj)
        save_inputs(ctx, o1, **inputs)
        ctx.weights = up_gate_proj, down_proj  # have main_grad; what recompute saves in their place has not
        ctx.o1_is_overwritten = False
        ctx.counts, ctx.dtype = counts, dtype
        ctx.wanted = [not tensor.stop_gradient for tensor in tensors]
        return output

    @staticmethod
    def backward(ctx, grad_out):
        refused = refused_gradients(_NAME, ctx.wanted)
        if refused is not None:
            return refused
        tokens, unzipped_probs, up_gate_proj, down_proj, o1 = saved_inputs(ctx, _NAME)
        # Both are looked at before anything is written.
        main_grads = {
            name: checked_main_grad(_NAME, name, weight) if want else None
            for name, weight, want in zip(("up_gate_proj", "down_proj"), ctx.weights, ctx.wanted[2:])
        }
        counts, dtype = ctx.counts, ctx.dtype
        want_tokens, want_probs, want_up_gate, want_down = ctx.wanted
        want_do1 = want_tokens or want_up_gate
        if ctx.o1_is_overwritten:
            # A second backward of a retained graph. Paddle's PyLayer has none up to 3.3, but must not give wrong gradients
            # where it has.
            o1 = _up(tokens, up_gate_proj, counts, dtype)

        do1 = probs_grad = o2_s = None
        if want_do1 or want_probs:
            do2_s = cast(grouped_matmul(grad_out, down_proj, counts, transpose=True), paddle.bfloat16)
            into = (o1 if want_do1 else None, None, do2_s if want_down else None)
            ctx.o1_is_overwritten = want_do1
            do1, probs_grad, o2_s = C.fused_swiglu_weighted_bwd_out(
                _NAME, o1, do2_s, unzipped_probs, None, *into, want_do1, want_probs, want_down
            )
        elif want_down:
            o2_s = C.fused_swiglu_weighted(o1, unzipped_probs, None)

        grad_tokens = grad_up_gate = grad_down = None
        if want_down:
            grad_down = _weight_grad(cast(o2_s, dtype), grad_out, counts, down_proj.dtype, main_grads["down_proj"])
        if want_do1:
            do1 = cast(do1, dtype)
        if want_up_gate:
            grad_up_gate = _weight_grad(cast(tokens, dtype), do1, counts, up_gate_proj.dtype, main_grads["up_gate_proj"])
        if want_tokens:
            grad_tokens = cast(grouped_matmul(do1, up_gate_proj, counts, transpose=True), tokens.dtype)
        return grad_tokens, probs_grad, grad_up_gate, grad_down


def _weight_grad(rows, grad_out, counts, dtype, main_grad):
    """The gradient of the weight, or None where it went into main_grad: Paddle then runs the weight's hooks all the same."""
    if main_grad is None:
        return grouped_weight_grad(rows, grad_out, counts, dtype)
    add_grouped_weight_grad(rows, grad_out, counts, main_grad)
    return None


def _check_tensors(tokens, unzipped_probs, up_gate_proj, down_proj, mixed):
    for name, tensor in (("tokens", tokens), ("unzipped_probs", unzipped_probs)):
        if not in_graph_mode():
            C.check_tensor(_NAME, name, tensor)
        elif not is_tensor(tensor):
            raise TypeError(f"{_NAME}: {name} must be a variable of the program, but is {type(tensor).__name__}")
    dtypes = (paddle.float32, paddle.bfloat16)
    if up_gate_proj.dtype not in dtypes or down_proj.dtype != up_gate_proj.dtype:
        raise ValueError(
            f"{_NAME}: the weights must both be float32 or both bfloat16, but up_gate_proj is {up_gate_proj.dtype} and "
            f"down_proj {down_proj.dtype}"
        )
    allowed = dtypes if mixed else (up_gate_proj.dtype,)
    if tokens.dtype not in allowed:
        raise ValueError(f"{_NAME}: tokens must have the weights' dtype {up_gate_proj.dtype}, but have {tokens.dtype}")
    hidden_size = up_gate_proj.shape[1]
    if len(tokens.shape) != 2 or tokens.shape[1] not in (-1, hidden_size):
        raise ValueError(f"{_NAME}: tokens must have shape [rows, {hidden_size}], but have {list(tokens.shape)}")
    if unzipped_probs.dtype != paddle.float32:
        raise ValueError(f"{_NAME}: unzipped_probs must have dtype float32, but have {unzipped_probs.dtype}")
    rows, shape = tokens.shape[0], list(unzipped_probs.shape)
    if -1 not in (rows, *shape) and shape not in ([rows], [rows, 1]):
        raise ValueError(f"{_NAME}: unzipped_probs must have shape [{rows}] or [{rows}, 1], but have {shape}")


def _ints_of(tokens_per_expert):
    """The numbers of a tensor on the CPU."""
    C.check_tensor(_NAME, "tokens_per_expert", tokens_per_expert)
    if 0 in tokens_per_expert.shape:
        return []  # without memory it has no place
    if str(tokens_per_expert.place) != "Place(cpu)":  # is_cpu_place is a method that to_static of 3.3 stumbles over
        raise ValueError(
            f"{_NAME}: tokens_per_expert must be a list or a tensor on the CPU, but is on {tokens_per_expert.place}; "
            "reading it there would make the host wait for the device"
        )
    if tokens_per_expert.dtype not in _INTEGERS:
        raise ValueError(f"{_NAME}: tokens_per_expert must be of integers, but has dtype {tokens_per_expert.dtype}")
    return tokens_per_expert.tolist()


def _checked_counts(tokens_per_expert, num_experts, rows):
    """A tuple of ints. ``rows`` is -1 where a graph does not know it yet."""
    counts = tokens_per_expert
    if isinstance(counts, np.ndarray) and counts.dtype.kind in "iu":
        counts = counts.tolist()
    counts = _as_ints(counts) if isinstance(counts, (list, tuple)) else None
    if counts is None:
        allowed = "a list of ints" + ("" if in_graph_mode() else " or an integer tensor on the CPU, of one dimension")
        raise TypeError(f"{_NAME}: tokens_per_expert must be {allowed}, but is {_describe(tokens_per_expert)}")
    if len(counts) != num_experts or min(counts) < 0:
        raise ValueError(
            f"{_NAME}: tokens_per_expert must have {num_experts} counts of 0 or more, one an expert, but is {list(counts)}"
        )
    if rows != -1 and sum(counts) != rows:
        raise ValueError(
            f"{_NAME}: tokens_per_expert must add up to the {rows} rows of tokens, but adds up to {sum(counts)}"
        )
    return counts


def _as_ints(values):
    """A tuple of ints; None where one is none."""
    if any(isinstance(value, (bool, paddle.Tensor)) or not hasattr(value, "__index__") for value in values):
        return None
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:  # arrays, and classes of ints, have the method too
        return None


def _describe(value):
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {', '.join(sorted({type(each).__name__ for each in value}))}"
    return type(value).__name__
