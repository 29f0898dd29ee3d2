"""What the outputs have to be: the library's float64 references, which need no Paddle where they are imported from here."""

import sys
from pathlib import Path

import numpy as np

from .cases import CLAMP_VALUE

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "python" / "paddle_gated_ops"))
import testing  # noqa: E402
from testing import reference  # noqa: E402

CHECKED_ROWS = 1024

#: How far another library's result may be: BF16 arithmetic throughout, eight roundings of 2^-8 in a row.
TOLERANCE = 2.0**-5

OUTPUTS = {
    "swiglu_weighted_bwd": ("do1", "probs_grad", "o2_s"),
    "swiglu_weighted_clamp_bwd": ("do1", "probs_grad", "o2_s"),
    "swiglu_weighted": ("o2_s",),
    "rmsnorm_silu_gate_bwd": ("grad_x", "grad_z", "grad_weight"),
    "rmsnorm_silu_gate": ("y",),
}


def _clamp_value(op):
    return CLAMP_VALUE if op == "swiglu_weighted_clamp_bwd" else None


def _expected(op, arrays):
    if op == "swiglu_weighted":
        return {"o2_s": reference.fused_swiglu_weighted(**arrays).value}
    if op == "rmsnorm_silu_gate":
        return {"y": reference.cake_rmsnorm_silu_gate(**arrays).value}
    if op == "rmsnorm_silu_gate_bwd":
        outputs = reference.cake_rmsnorm_silu_gate_train_backward(**arrays)
    else:
        outputs = reference.fused_swiglu_weighted_bwd(**arrays, clamp_value=_clamp_value(op))
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
        testing.assert_swiglu_weighted_bwd(arrays, outputs, _clamp_value(op))


def assert_close(op, arrays, outputs):
    """AssertionError where an output is further than TOLERANCE * (|right| + its root mean square) from float64."""
    right_ones = _expected(op, arrays)
    for name, got in outputs.items():
        got, right = reference.to_float64(got), right_ones[name]
        if got.shape != right.shape:
            raise AssertionError(f"{name}: shape {got.shape} in place of {right.shape}")
        wrong = ~(np.abs(got - right) <= TOLERANCE * (np.abs(right) + np.sqrt(np.mean(np.square(right)))))
        if wrong.any():
            at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            raise AssertionError(f"{name}{[int(i) for i in at]}: {got[at]:.6g} in place of {right[at]:.6g}")


def check(case, arrays, call, assert_outputs, names=None):
    """Checks the first and the last CHECKED_ROWS rows of a call's outputs; grad_weight, a sum, of calls on those rows.

    Args:
        case (cases.Case): what is called.
        arrays (dict): its inputs.
        call: of a slice of the rows; returns the outputs as arrays, BF16 as uint16 bits.
        assert_outputs: assert_as_promised or assert_close.
        names (tuple, optional): of the outputs, where they are not all of OUTPUTS[case.op].
    """
    names = names or OUTPUTS[case.op]
    whole = dict(zip(names, call(slice(0, case.rows))))
    if len(whole) != len(names):
        raise AssertionError(f"{len(whole)} outputs in place of {len(names)}")
    many = case.rows > CHECKED_ROWS
    for rows in [slice(0, CHECKED_ROWS), slice(case.rows - CHECKED_ROWS, case.rows)] if many else [slice(0, case.rows)]:
        outputs = {name: a if name == "grad_weight" else a[rows] for name, a in whole.items()}
        if many and "grad_weight" in outputs:
            outputs["grad_weight"] = call(rows)[-1]
        inputs = {name: a if name == "weight" else a[rows] for name, a in arrays.items()}
        assert_outputs(case.op, inputs, outputs)
