"""What the outputs have to be: the library's float64 references, which need no Paddle where they are imported from here."""

import sys
from pathlib import Path

import numpy as np

from .cases import CLAMP_VALUE, NORM_SIZE

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "python" / "paddle_gated_ops"))
import testing  # noqa: E402
from testing import reference  # noqa: E402

CHECKED_ELEMENTS = 2**17  # of an output of so many columns as the case has, at each of three places

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


def _rows(arrays, begin, end):
    """Rows of inputs that repeat."""
    at = range(begin, end)
    return {name: array if name == "weight" else array.take(at, axis=0, mode="wrap") for name, array in arrays.items()}


def _checked_rows(case):
    """[(begin, end)] of the first rows, some in the middle, and the last; all where there are few."""
    count = max(1, CHECKED_ELEMENTS // case.columns)
    if case.rows <= 3 * count:
        return [(0, case.rows)]
    return [(begin, begin + count) for begin in (0, (case.rows - count) // 2, case.rows - count)]


def _expected_sum(case, arrays):
    """grad_weight over all rows and the magnitudes of its bound: of one period, as often as it is repeated, and the rest."""
    period = len(arrays["x"])
    repeats, rest = divmod(case.rows, period)
    value, magnitudes = np.zeros(NORM_SIZE), [np.zeros(NORM_SIZE)] * 3
    for times, count in ((repeats, period), (1, rest)):
        if times and count:
            part = reference.cake_rmsnorm_silu_gate_train_backward(**_rows(arrays, 0, count))
            value = value + times * part.grad_weight
            magnitudes = [a + times * b for a, b in zip(magnitudes, part.magnitudes["grad_weight"])]
    return value, reference.Magnitudes(*magnitudes, nonfinite=0)


def _assert_close(name, got, right):
    got = reference.to_float64(got)
    if got.shape != right.shape:
        raise AssertionError(f"{name}: shape {got.shape} in place of {right.shape}")
    wrong = ~(np.abs(got - right) <= TOLERANCE * (np.abs(right) + np.sqrt(np.mean(np.square(right)))))
    if wrong.any():
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise AssertionError(f"{name}{[int(i) for i in at]}: {got[at]:.6g} in place of {right[at]:.6g}")


def _assert_promised_rows(op, arrays, outputs):
    if op == "swiglu_weighted":
        testing.assert_swiglu_weighted(arrays, outputs["o2_s"])
    elif op == "rmsnorm_silu_gate":
        testing.assert_rmsnorm_silu_gate(arrays, outputs["y"])
    elif op == "rmsnorm_silu_gate_bwd":
        testing.assert_rmsnorm_silu_gate_bwd(arrays, {**outputs, "grad_weight": None}, compute_grad_weight=False)
    else:
        testing.assert_swiglu_weighted_bwd(arrays, outputs, _clamp_value(op))


def check(case, arrays, outputs, promised, names=None, read=np.asarray):
    """Checks rows of a call's outputs, the first, the last and some between, and grad_weight, the sum over all rows.

    float64 takes longer than the timing, and so does a large output's way from a GPU: hence not all rows.

    Args:
        case (cases.Case): what was called.
        arrays (dict): its inputs, of arrays.make_inputs.
        outputs (sequence): tensors in OUTPUTS' order.
        promised (bool): within this library's bounds, else within TOLERANCE * (|right| + right's root mean square).
        names (tuple, optional): of the outputs, where they are not all of OUTPUTS[case.op].
        read: of a tensor, returns an array, BF16 as uint16 bits or as numbers.

    Raises:
        AssertionError: an output is wrong, or missing.
    """
    names = names or OUTPUTS[case.op]
    if len(outputs) != len(names):
        raise AssertionError(f"{len(outputs)} outputs in place of {len(names)}")
    outputs = dict(zip(names, outputs))
    total = outputs.pop("grad_weight", None)
    for name, output in outputs.items():
        if len(output) != case.rows:
            raise AssertionError(f"{name}: {len(output)} rows in place of {case.rows}")
    for begin, end in _checked_rows(case):
        inputs = _rows(arrays, begin, end)
        found = {name: read(output[begin:end]) for name, output in outputs.items()}
        if promised:
            _assert_promised_rows(case.op, inputs, found)
        else:
            right = _expected(case.op, inputs)
            for name in found:
                _assert_close(name, found[name], right[name])
    if total is None:
        return
    right, magnitudes = _expected_sum(case, arrays)
    total = read(total)
    if not promised:
        return _assert_close("grad_weight", total, right)
    error = testing.error_in_bounds(total, right, testing.promise3_bound(right, magnitudes, "bfloat16")).max()
    if not error <= 1:
        raise AssertionError(f"grad_weight errs by {error:.3g} times the promised bound")
