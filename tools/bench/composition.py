"""What the ops are without this library: compositions of Paddle's own functions, the quickest that were found.

Backwards of SwiGLU are Paddle's gradients of Paddle's swiglu (on a CPU 44 % quicker than the formula in elementary ones);
that of the norm is the formula (23 % quicker there than Paddle's gradients of the forward).
"""

import paddle
import paddle.incubate.nn.functional as incubate
import paddle.nn.functional as F

from .cases import CLAMP_VALUE

try:
    from paddle.nn.functional import swiglu  # from 3.3 on; before in paddle.incubate, which 3.3 warns of
except ImportError:
    swiglu = getattr(incubate, "swiglu", None)


def _swiglu(x, y=None):
    if swiglu is not None:
        return swiglu(x, y)
    gate, up = x.chunk(2, axis=-1) if y is None else (x, y)  # Paddle 2.6 has none
    return F.silu(gate) * up


def _trainable(tensor):
    leaf = tensor.detach()
    leaf.stop_gradient = False
    return leaf


def _swiglu_weighted_bwd(o1, do2_s, unzipped_probs, halves=lambda o1: (o1, None)):
    o1, probs = _trainable(o1), _trainable(unzipped_probs)
    o2_s = _swiglu(*halves(o1)) * probs.unsqueeze(-1).astype(o1.dtype)
    do1, probs_grad = paddle.grad(o2_s, [o1, probs], do2_s)
    return do1, probs_grad, o2_s.detach()


def _clamped(o1):
    gate, up = o1.chunk(2, axis=-1)
    return gate.clip(max=CLAMP_VALUE), up.clip(-CLAMP_VALUE, CLAMP_VALUE)


def _swiglu_weighted_clamp_bwd(o1, do2_s, unzipped_probs):
    return _swiglu_weighted_bwd(o1, do2_s, unzipped_probs, _clamped)


def _swiglu_weighted(o1, unzipped_probs):
    return (_swiglu(o1) * unzipped_probs.unsqueeze(-1).astype(o1.dtype),)


def _rmsnorm_silu_gate_bwd(grad_out, x, z, weight, eps=1e-6):
    rstd = paddle.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    n, s = x * rstd, F.sigmoid(z)
    a = grad_out * (z * s)
    c = a * weight
    grad_x = rstd * (c - n * (c * n).mean(-1, keepdim=True))
    grad_z = grad_out * (n * weight) * (s * (1 + z * (1 - s)))
    return grad_x, grad_z, (a * n).sum(0)


def _rmsnorm_silu_gate(x, z, weight, eps=1e-6):
    return (x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight * F.silu(z),)


FUNCTIONS = {
    "swiglu_weighted_bwd": _swiglu_weighted_bwd,
    "swiglu_weighted_clamp_bwd": _swiglu_weighted_clamp_bwd,
    "swiglu_weighted": _swiglu_weighted,
    "rmsnorm_silu_gate_bwd": _rmsnorm_silu_gate_bwd,
    "rmsnorm_silu_gate": _rmsnorm_silu_gate,
}


def with_casts(function):
    """The same from BF16 to BF16 with FP32 inside, as a Paddle without BF16 kernels needs it."""

    def cast_function(**inputs):
        outputs = function(**{name: tensor.astype("float32") for name, tensor in inputs.items()})
        return tuple(tensor if tensor.ndim == 1 and "o1" in inputs else tensor.astype("bfloat16") for tensor in outputs)

    return cast_function
