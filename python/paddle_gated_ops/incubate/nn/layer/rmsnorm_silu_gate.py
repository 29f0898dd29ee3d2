"""The gated RMSNorm of GatedDeltaNet and Qwen3-Next layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddle import Tensor
from paddle.nn import Layer
from paddle.nn.initializer import Constant

from ...._checks import check_int
from ...._library import C
from ..functional.rmsnorm_silu_gate import rmsnorm_silu_gate
from ._weight_attr import checked_weight_attr

if TYPE_CHECKING:
    from paddle._typing import ParamAttrLike

_HIDDEN_SIZE = 128  # what the kernels are made for


class RMSNormSiLUGate(Layer):
    r"""RMSNorm(x) * weight * SiLU(z), normalized over the last dimension of 128.

    .. math::
        rstd = 1 / \sqrt{mean(x^2) + epsilon}, \qquad y = ((x \cdot rstd) \cdot weight) \cdot silu(z)

    FP32 inside, one rounding. Forward and backward are ``functional.cake_rmsnorm_silu_gate``'s: x, z and the weight alone
    are kept for the backward pass.

    The weight may be float32 too: it is cast to BF16 for each call, and its gradient is the float32 sum, unrounded.

    Where ``weight.main_grad`` (float32, [128]) exists when the backward runs, in eager mode, the weight's gradient is added
    to it in place, ``weight.grad`` stays as it is, and the hooks of ``weight._register_backward_hook`` run; those of
    ``weight.register_hook`` get no gradient to work on. In a graph main_grad is passed over. DataParallel does not
    reduce it.

    As any ``PyLayer`` of Paddle up to 3.3, the node can run backward once only: a second backward through the same forward,
    also under retain_graph=True, ends the process. ``paddle.grad`` with respect to some of the trainable inputs needs
    stop_gradient=True on the others.

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
            shape or place other than these, or auto_cast with float16; in its backward, a main_grad that is not float32 of
            the weight's shape.
        TypeError: hidden_size is no int, epsilon no number, weight_attr none; in a call, an argument is no Tensor.
        NotImplementedError: in its backward under create_graph=True, in eager mode. In a graph Paddle takes the gradient for
            a constant.

    Examples:
        >>> import paddle
        >>> from paddle_gated_ops.incubate.nn import RMSNormSiLUGate
        >>> norm = RMSNormSiLUGate(128)
        >>> packed = paddle.randn([64, 32, 512]).astype('bfloat16')
        >>> y = norm(packed[:, :, :128], packed[:, :, 256:384])
        >>> print(list(y.shape), y.dtype)
        [64, 32, 128] paddle.bfloat16
    """

    def __init__(
        self, hidden_size: int = _HIDDEN_SIZE, epsilon: float = 1e-6, weight_attr: ParamAttrLike | None = None
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if check_int(name, "hidden_size", hidden_size) != _HIDDEN_SIZE:
            raise ValueError(f"{name}: hidden_size must be {_HIDDEN_SIZE}, but is {hidden_size}")
        weight_attr = checked_weight_attr(name, weight_attr)
        try:
            C.checked_eps(name, epsilon)
        except (TypeError, ValueError) as error:  # which has the function's name of it
            raise type(error)(str(error).replace(" eps ", " epsilon ")) from None
        self._epsilon = epsilon
        self.weight = self.create_parameter([hidden_size], attr=weight_attr, default_initializer=Constant(1.0))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return rmsnorm_silu_gate(x, z, self.weight, self._epsilon, cast_weight=True)

    def extra_repr(self) -> str:
        return f"hidden_size={_HIDDEN_SIZE}, epsilon={self._epsilon}, dtype={self.weight.dtype}"
