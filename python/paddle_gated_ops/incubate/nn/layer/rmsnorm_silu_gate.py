"""The gated RMSNorm of GatedDeltaNet and Qwen3-Next layers."""

import paddle
from paddle.autograd import PyLayer
from paddle.nn import Layer
from paddle.nn.initializer import Constant

from ...._amp import cast_inputs
from ...._autograd import any_dist, needs_node, refuse_create_graph, save_inputs, saved_inputs
from ...._graph import in_graph_mode, unified
from ...._library import C
from ..functional import cake_rmsnorm_silu_gate

_FUNCTION = "cake_rmsnorm_silu_gate"
_HIDDEN_SIZE = 128  # what the kernels are made for


class RMSNormSiLUGate(Layer):
    r"""RMSNorm(x) * weight * SiLU(z), normalized over the last dimension of 128.

    .. math::
        rstd = 1 / \sqrt{mean(x^2) + epsilon}, \qquad y = ((x \cdot rstd) \cdot weight) \cdot silu(z)

    FP32 inside, one rounding. Forward and backward are ``functional.cake_rmsnorm_silu_gate``'s: x, z and the weight alone
    are kept for the backward pass.

    The weight may be float32 too: it is cast to BF16 for each call, and its gradient is the float32 sum (in a graph, and for
    DistTensors, rounded to BF16 by the gradient of the cast).

    Where ``weight.main_grad`` (float32, [128]) exists when the backward runs, in eager mode, the weight's gradient is added
    to it in place, ``weight.grad`` stays as it is, and the weight's backward hooks run.

    It stands in for PaddleFormers' ``Qwen3NextRMSNormGated``, called with (hidden_states, gate): the parameter has the same
    name and shape, and gate may be a slice of a packed projection, which is read in place in eager mode.

    Args:
        hidden_size (int): the last dimension: 128.
        epsilon (float): finite, not negative.
        weight_attr (ParamAttr, optional): of the weight, as in ``paddle.nn.LayerNorm``. By default the weight is 1, in
            ``paddle.get_default_dtype()``.

    Attributes:
        weight (Parameter): [128], bfloat16 or float32.

    Shape:
        - x: bfloat16, [..., 128].
        - z: bfloat16, x's shape.
        - output: bfloat16, x's shape.

    Where ``paddle.amp.auto_cast`` acts with bfloat16, float32 x and z are cast to bfloat16.

    Raises:
        ValueError: hidden_size is not 128, epsilon is negative or not finite, weight_attr is False; in a call, a dtype,
            shape or place other than these, or auto_cast with float16.
        TypeError: epsilon is no number; in a call, an argument is no Tensor.
        NotImplementedError: in its backward under create_graph=True.

    Examples:
        >>> import paddle
        >>> from paddle_gated_ops.incubate.nn import RMSNormSiLUGate
        >>> norm = RMSNormSiLUGate(128)
        >>> packed = paddle.randn([64, 32, 512]).astype('bfloat16')
        >>> y = norm(packed[:, :, :128], packed[:, :, 256:384])
        >>> print(list(y.shape), y.dtype)
        [64, 32, 128] paddle.bfloat16
    """

    def __init__(self, hidden_size=_HIDDEN_SIZE, epsilon=1e-6, weight_attr=None):
        super().__init__()
        name = type(self).__name__
        if hidden_size != _HIDDEN_SIZE:
            raise ValueError(f"{name}: hidden_size must be {_HIDDEN_SIZE}, but is {hidden_size}")
        if weight_attr is False:
            raise ValueError(f"{name}: weight_attr must not be False, as the layer has no form without a weight")
        C.checked_eps(name, epsilon)
        self._epsilon = epsilon
        self.weight = self.create_parameter([hidden_size], attr=weight_attr, default_initializer=Constant(1.0))

    def forward(self, x, z):
        return _rms_norm_silu_gate(x, z, self.weight, self._epsilon)

    def extra_repr(self):
        return f"hidden_size={_HIDDEN_SIZE}, epsilon={self._epsilon}, dtype={self.weight.dtype}"


@unified
def _rms_norm_silu_gate(x, z, weight, eps):
    if weight.dtype != paddle.float32:
        return cake_rmsnorm_silu_gate(x, z, weight, eps)
    if in_graph_mode() or any_dist(x, z, weight) or not needs_node(x, z, weight):
        return cake_rmsnorm_silu_gate(x, z, weight.astype("bfloat16"), eps)
    x, z = cast_inputs(_FUNCTION, {"x": (x, "bfloat16"), "z": (z, "bfloat16")})
    return _WithFp32Weight.apply(x, z, weight, eps)


class _WithFp32Weight(PyLayer):
    """The function's node with the cast of the weight inside: the gradient of a cast outside would be rounded to BF16, and
    main_grad, which belongs to the weight, not to its cast, would be passed over."""

    @staticmethod
    def forward(ctx, x, z, weight, eps):
        output = C.cake_rmsnorm_silu_gate(_FUNCTION, x, z, weight.astype("bfloat16"), eps, None)
        save_inputs(ctx, x=x, z=z, weight=weight)
        ctx.weight = weight  # has main_grad; what recompute saves in its place has not
        ctx.eps = eps
        ctx.wanted = [not tensor.stop_gradient for tensor in (x, z, weight)]
        return output

    @staticmethod
    def backward(ctx, grad_out):
        refuse_create_graph(_FUNCTION)
        x, z, weight = saved_inputs(ctx, _FUNCTION)
        want_x, want_z, want_weight = ctx.wanted
        main_grad = getattr(ctx.weight, "main_grad", None) if want_weight else None
        grad_weight = main_grad
        if want_weight and main_grad is None:
            grad_weight = paddle.empty_like(weight)
        grad_x, grad_z, grad_weight = C.cake_rmsnorm_silu_gate_train_backward(
            grad_out,
            x,
            z,
            weight.astype("bfloat16"),
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
        # None for the weight: Paddle then runs its backward hooks once, as after a gradient of its own.
        return grad_x, grad_z, grad_weight if main_grad is None else None
