"""Who computes an op in this process: our functions, Paddle's composition, Paddle's own fused op."""

from typing import Callable, NamedTuple

import paddle.incubate.nn.functional as paddle_functional

from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn import functional as F

from . import oracle, records
from .buffers import Set
from .cases import CLAMP_VALUE
from .composition import FUNCTIONS as COMPOSITIONS
from .composition import with_casts

_OURS = {
    "swiglu_weighted_bwd": F.fused_swiglu_weighted_bwd,
    "swiglu_weighted_clamp_bwd": lambda **inputs: F.fused_swiglu_weighted_clamp_bwd(**inputs, clamp_value=CLAMP_VALUE),
    "swiglu_weighted": F.fused_swiglu_weighted,
    "rmsnorm_silu_gate_bwd": F.cake_rmsnorm_silu_gate_train_backward,
    "rmsnorm_silu_gate": F.cake_rmsnorm_silu_gate,
}
_OURS_OUT = {
    "swiglu_weighted_bwd": F.fused_swiglu_weighted_bwd_out,
    "rmsnorm_silu_gate_bwd": F.cake_rmsnorm_silu_gate_train_backward,
    "rmsnorm_silu_gate": F.cake_rmsnorm_silu_gate_train_forward,
}


class Provider(NamedTuple):
    """Somebody's version of an op.

    Attributes:
        name (str): in the records.
        call: of a Set; returns the outputs, a tuple.
        sets (list of Set): what it is called with in turn.
        fresh (bool): it allocates its outputs.
        promised (bool): checked against this library's bounds, else whether it is the same function at all.
    """

    name: str
    call: Callable
    sets: list
    fresh: bool
    promised: bool

    def check(self, case, arrays):
        """AssertionError where the first set's outputs are wrong."""
        oracle.check(case, arrays, self.call(self.sets[0]), self.promised, read=testing.array_of)

    def timed_call(self):
        """A function of i, the number of the call."""
        call, sets = self.call, self.sets
        return lambda i: call(sets[i % len(sets)])


def _calling(function, with_outputs=False):
    def call(tensors):
        outputs = function(**tensors.inputs, **tensors.outputs) if with_outputs else function(**tensors.inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return call


def right_ones(found, case, arrays):
    """Those of other people's versions that are right, and records of why the others are left out."""
    right, left_out = [], []
    for provider in found:
        try:
            provider.check(case, arrays)
            right.append(provider)
        except (AssertionError, RuntimeError) as error:
            left_out.append(records.skipped(case, provider.name, f"{type(error).__name__}: {error}"))
    return right, left_out


def ours(op, sets):
    """Our functions: into given outputs where there is one that takes them, and one that allocates them."""
    found = [Provider("ours", _calling(_OURS[op]), sets, fresh=True, promised=True)]
    if op in _OURS_OUT:
        call = _calling(_OURS_OUT[op], with_outputs=True)
        found.insert(0, Provider("ours, outputs given", call, sets, fresh=False, promised=True))
    return found


def paddles(op, sets, device):
    """Paddle's composition, and its own fused op where the build has it."""
    composition = COMPOSITIONS[op]
    if device == "gpu":
        found = [Provider("Paddle, unfused", _calling(composition), sets, fresh=True, promised=False)]
        fused = getattr(paddle_functional, "fused_swiglu_weighted_bwd", None)
        if op == "swiglu_weighted_bwd" and fused is not None:
            found.append(Provider("Paddle, fused", _calling(fused), sets, fresh=True, promised=False))
        return found
    fp32 = [Set({name: tensor.astype("float32") for name, tensor in s.inputs.items()}, {}) for s in sets]
    return [
        Provider("Paddle, unfused", _calling(with_casts(composition)), sets, fresh=True, promised=False),
        Provider("Paddle, unfused, FP32 tensors", _calling(composition), fp32, fresh=True, promised=False),
    ]
