"""What the outputs have to be: float64."""

import numpy as np
from paddle_gated_ops import testing
from paddle_gated_ops.testing import reference

from .agreement import assert_same_function
from .cases import CLAMP_VALUE

CHECKED_ROWS = 1024

OUTPUTS = {
    "swiglu_weighted_bwd": ("do1", "probs_grad", "o2_s"),
    "swiglu_weighted_clamp_bwd": ("do1", "probs_grad", "o2_s"),
    "swiglu_weighted": ("o2_s",),
    "rmsnorm_silu_gate_bwd": ("grad_x", "grad_z", "grad_weight"),
    "rmsnorm_silu_gate": ("y",),
}


def expected(op, arrays):
    """The outputs in float64, by name."""
    if op == "swiglu_weighted":
        return {"o2_s": reference.fused_swiglu_weighted(**arrays).value}
    if op == "rmsnorm_silu_gate":
        return {"y": reference.cake_rmsnorm_silu_gate(**arrays).value}
    if op == "rmsnorm_silu_gate_bwd":
        outputs = reference.cake_rmsnorm_silu_gate_train_backward(**arrays)
    else:
        clamp_value = CLAMP_VALUE if op == "swiglu_weighted_clamp_bwd" else None
        outputs = reference.fused_swiglu_weighted_bwd(**arrays, clamp_value=clamp_value)
    return {name: getattr(outputs, name) for name in OUTPUTS[op]}


def assert_as_promised(op, arrays, outputs):
    """AssertionError where an output is further from float64 than this library promises."""
    if op == "swiglu_weighted":
        testing.assert_swiglu_weighted(arrays, outputs["o2_s"])
    elif op == "rmsnorm_silu_gate":
        testing.assert_rmsnorm_silu_gate(arrays, outputs["y"])
    elif op == "rmsnorm_silu_gate_bwd":
        testing.assert_rmsnorm_silu_gate_bwd(arrays, outputs)
    else:
        testing.assert_swiglu_weighted_bwd(arrays, outputs, CLAMP_VALUE if op == "swiglu_weighted_clamp_bwd" else None)


def assert_close(op, arrays, outputs):
    """AssertionError where the outputs, BF16 bits or numbers, are not the op's in BF16 or better."""
    assert_same_function({name: reference.to_float64(a) for name, a in outputs.items()}, expected(op, arrays))


def _rows(values, rows):
    return {name: a if name in ("weight", "grad_weight", "workspace") else a[rows] for name, a in values.items()}


def check(case, arrays, tensors, call, assert_outputs):
    """Checks the first and the last CHECKED_ROWS rows of a call's outputs; grad_weight, a sum, of calls on those rows.

    Args:
        arrays (dict): the inputs, NumPy.
        tensors (buffers.Set): the same as tensors, with the outputs that the call is given.
        call: of a Set; returns the outputs in OUTPUTS' order.
        assert_outputs: assert_as_promised or assert_close.
    """

    def array(tensor):
        return testing.bits_of(tensor) if "bfloat16" in str(tensor.dtype) else testing.floats_of(tensor)

    whole = {name: array(tensor) for name, tensor in zip(OUTPUTS[case.op], call(tensors))}
    first, last = slice(0, CHECKED_ROWS), slice(case.rows - CHECKED_ROWS, case.rows)
    for rows in [first, last] if case.rows > CHECKED_ROWS else [first]:
        outputs = _rows(whole, rows)
        if case.rows > CHECKED_ROWS and "grad_weight" in whole:
            part = type(tensors)(_rows(tensors.inputs, rows), _rows(tensors.outputs, rows))
            outputs["grad_weight"] = array(call(part)[-1])
        assert_outputs(case.op, _rows(arrays, rows), outputs)
