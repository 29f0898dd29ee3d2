"""How far a result may be from float64, and checks of both ops' outputs against that.

The bounds are the library's numerical promises; nothing in them was fitted to a result.

- Element-wise BF16 outputs (do1, o2_s, y, grad_x, grad_z), ``promise1_bound``: one BF16 ulp (half of
  it is the one rounding at the store), 2^-20 * (1 + |gate| / 16) of the terms' magnitudes (FP32
  where terms cancel, and a one-step exp), and 2^-126 of the product of the other factors where
  sigmoid(gate) is below 2^-126 (the end of FP32's normal range).
- Sums (probs_grad, grad_weight), ``promise3_bound``: the same 2^-20 and 2^-126 terms, and the one
  rounding of the result.

Both add what intermediate results below FP32's normal range cost: see ``fp32_range``.

A check reports the worst error in units of the bound, so 1.0 or less passes. NaN and Inf have to
be where the reference has them, with three exceptions: a value that rounds past the largest finite
number of its dtype is right as Inf; Inf is also accepted where an error within the bound leads
there; and where an intermediate result leaves FP32's range, what FP32 then gives is accepted
(``reference.Magnitudes.nonfinite``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from . import reference
from .bf16 import bf16_ulp, from_bf16_bits
from .fp32_range import BITS_NAN, BITS_NEGATIVE, BITS_POSITIVE, FP32_INF_FROM

__all__ = [
    "bf16_ulp",
    "error_in_ulps",
    "error_in_bounds",
    "promise1_bound",
    "promise3_bound",
    "check_swiglu_weighted",
    "assert_swiglu_weighted",
    "check_swiglu_weighted_bwd",
    "assert_swiglu_weighted_bwd",
    "check_rmsnorm_silu_gate",
    "assert_rmsnorm_silu_gate",
    "check_rmsnorm_silu_gate_bwd",
    "assert_rmsnorm_silu_gate_bwd",
]

_FP32_RELATIVE = 2.0**-20
_BF16_INF_FROM = 2.0**128 - 2.0**119  # this and larger values become Inf in BF16
_INF = 2.0**128  # what Inf stands for beside a value of the last binade
_HALF_SMALLEST = {"bfloat16": 2.0**-134, "float32": 2.0**-150}
_INF_FROM = {"bfloat16": _BF16_INF_FROM, "float32": FP32_INF_FROM}
_HALF_ULP = {"bfloat16": 2.0**-8, "float32": 2.0**-24}  # relative


def _fp32_cost(magnitudes):
    return (
        _FP32_RELATIVE * magnitudes.terms
        + reference.TINY_SIGMOID * magnitudes.tiny_sigmoid
        + magnitudes.underflow
    )


_Arrays = Mapping[str, np.ndarray]


def promise1_bound(value: ArrayLike, magnitudes: reference.Magnitudes) -> np.ndarray:
    """Bound of an element-wise BF16 result's error.

    ``bf16_ulp(value) + 2^-20 * terms + 2^-126 * tiny_sigmoid + underflow``

    Where the value and all the terms are 0, a factor of each term is 0: any arithmetic gives 0
    then, and the bound is 0.

    Args:
        value (float64 array): the reference.
        magnitudes (reference.Magnitudes): of the same shape.

    Returns:
        float64 array of that shape.
    """
    cost = _fp32_cost(magnitudes)
    return np.where((value == 0) & (cost == 0), 0.0, bf16_ulp(value) + cost)


def promise3_bound(value: ArrayLike, magnitudes: reference.Magnitudes, dtype: str) -> np.ndarray:
    """Bound of a sum's error.

    ``2^-20 * terms + 2^-126 * tiny_sigmoid + underflow + rounding``

    ``rounding`` is 2^-8 * |value| for BF16 and 2^-24 * |value| for FP32, at least half the smallest
    subnormal number (2^-134, 2^-150), and 0 where the value and all the terms are 0.

    Args:
        value (float64 array): the reference; with accumulation, what was there included.
        magnitudes (reference.Magnitudes): of the sum alone.
        dtype (str): "bfloat16" or "float32", the result's.

    Returns:
        float64 array of value's shape.
    """
    cost = _fp32_cost(magnitudes)
    rounding = np.maximum(_HALF_ULP[dtype] * np.abs(value), _HALF_SMALLEST[dtype])
    return np.where((value == 0) & (cost == 0), 0.0, rounding + cost)


def _error_in_bounds(got, expected, bound, nonfinite, dtype):
    with np.errstate(all="ignore"):
        error = np.abs(got - expected)
        ratio = np.where(error == 0, 0.0, error / bound)
        ratio[np.isnan(ratio)] = np.inf
        finite = np.isfinite(error)
        if finite.all():
            return ratio

        odd = np.nonzero(~finite)
        got, expected, bound, bits = got[odd], expected[odd], bound[odd], nonfinite[odd]
        ahead = np.sign(got) * expected  # how far expected lies in Inf's direction
        distance = np.where(ahead >= _INF_FROM[dtype], 0.0, _INF - ahead)
        counts = np.isinf(got) & ((ahead >= _INF / 2) | (distance <= bound))
        result = np.where(counts, np.where(distance == 0, 0.0, distance / bound), np.inf)
        accepted = np.isnan(got) & (np.isnan(expected) | (bits & BITS_NAN > 0))
        accepted |= (got == np.inf) & (bits & BITS_POSITIVE > 0)
        accepted |= (got == -np.inf) & (bits & BITS_NEGATIVE > 0)
        result[accepted] = 0.0
        ratio[odd] = np.where(np.isnan(result), np.inf, result)
        return ratio


def error_in_bounds(
    got: ArrayLike, expected: ArrayLike, bound: ArrayLike, nonfinite: ArrayLike = 0, dtype: str = "bfloat16"
) -> np.ndarray:
    """|got - expected| / bound, Inf where NaN or Inf is where it must not be, or missing.

    0 errs by 0 even where the bound is 0. An Inf is exact where ``expected`` rounds to it in
    ``dtype``, counts as 2^128 of its sign from 2^127 on and where the bound reaches as far, and
    is wrong elsewhere.

    Args:
        got (array_like): BF16 bits (uint16) or numbers.
        expected, bound (array_like): float64.
        nonfinite (array_like): uint8 bits as in ``reference.Magnitudes``.
        dtype (str): "bfloat16" or "float32", got's dtype.

    Returns:
        float64 array; the arguments are broadcast against each other.
    """
    arrays = (
        reference.to_float64(got),
        np.asarray(expected, dtype=np.float64),
        np.asarray(bound, dtype=np.float64),
        np.asarray(nonfinite, dtype=np.uint8),
    )
    got, expected, bound, nonfinite = np.broadcast_arrays(*arrays)
    shape = got.shape
    got, expected, bound, nonfinite = (array.reshape(-1) for array in (got, expected, bound, nonfinite))
    return _error_in_bounds(got, expected, bound, nonfinite, dtype).reshape(shape)


def error_in_ulps(got: ArrayLike, expected: ArrayLike) -> np.ndarray:
    """Error of a BF16 result in BF16 ulps of the float64 value; see :func:`error_in_bounds`.

    Args:
        got (array_like): BF16 bits (uint16) or numbers.
        expected (array_like): float64.
    """
    return error_in_bounds(got, expected, bf16_ulp(expected))


class _Finding(NamedTuple):
    """The worst element of an output so far."""

    ratio: float = 0.0
    element: tuple | None = None
    got: float = 0.0
    expected: float = 0.0
    bound: float = 0.0


class _Output:
    """One output under check: its array, and the worst element among the blocks seen."""

    def __init__(self, name, array, shape, dtypes):
        if hasattr(array, "data_ptr"):
            raise TypeError(f"{name}: expected a NumPy array, see bits_of() and floats_of()")
        array = np.asarray(array)
        known = {"uint16": "bfloat16", "float32": "float32"}
        self.dtype = known.get(str(array.dtype), str(array.dtype))
        if self.dtype not in dtypes:
            raise AssertionError(f"{name}: expected {' or '.join(dtypes)}, got {self.dtype}")
        if array.shape != tuple(shape):
            raise AssertionError(f"{name}: expected shape {tuple(shape)}, got {array.shape}")
        self.name, self.shape, self.array = name, array.shape, array
        self.worst = _Finding()

    def compare(self, rows, expected, bound, nonfinite):
        """Compares a slice of the rows; ``expected`` has the rows flattened in front."""
        if expected.size == 0:
            return
        got = reference.to_float64(self.array.reshape((-1,) + expected.shape[1:])[rows])
        ratio = _error_in_bounds(got, expected, bound, nonfinite, self.dtype)
        at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
        if ratio[at] > self.worst.ratio or self.worst.element is None:
            position = rows.start * ratio[0].size + int(np.ravel_multi_index(at, ratio.shape))
            index = tuple(int(i) for i in np.unravel_index(position, self.shape))
            self.worst = _Finding(ratio[at], index, got[at], expected[at], bound[at])


def _ratios(outputs):
    return {output.name: float(output.worst.ratio) for output in outputs}


def _raise_past_bound(outputs, describe):
    for output in outputs:
        worst = output.worst
        if not worst.ratio <= 1.0:
            found = describe(output.name, worst.element)
            inputs = ", ".join(f"{name}={value:.9g}" for name, value in found.items())
            raise AssertionError(
                f"{output.name}{list(worst.element)} ({output.dtype}): got {worst.got:.9g}, "
                f"expected {worst.expected:.17g}, error {worst.ratio:.4g} times the bound "
                f"{worst.bound:.4g}; inputs there: {inputs}"
            )
    return _ratios(outputs)


def _run_forward(name, output, forward):
    checked = _Output(name, output, forward.value.shape, ("bfloat16",))
    if forward.value.size == 0:
        return [checked]
    flat = (-1, forward.value.shape[-1])
    value, *parts = (part.reshape(flat) for part in (forward.value, *forward.magnitudes))
    magnitudes = reference.Magnitudes(*parts)
    rows = slice(0, len(value))
    checked.compare(rows, value, promise1_bound(value, magnitudes), magnitudes.nonfinite)
    return [checked]


def _describe_swiglu(inputs, index):
    o1, probs = (reference.to_float64(inputs[key]) for key in ("o1", "unzipped_probs"))
    half = o1.shape[-1] // 2
    row, column = index[:-1], index[-1] % half
    prob = probs.reshape(o1.shape[:-1])[row]
    return {"gate": o1[row][column], "up": o1[row][half + column], "prob": prob}


def _run_swiglu_forward(inputs, output, clamp_value):
    forward = reference.fused_swiglu_weighted(inputs["o1"], inputs["unzipped_probs"], clamp_value)
    return _run_forward("o2_s", output, forward)


def check_swiglu_weighted(
    inputs: _Arrays, output: np.ndarray, clamp_value: float | None = None
) -> dict[str, float]:
    """Worst error of ``fused_swiglu_weighted``'s output, in units of its bound.

    Args:
        inputs (dict): "o1" (uint16 BF16 bits), "unzipped_probs" (float32).
        output (array): o2_s, uint16 BF16 bits.
        clamp_value (float, optional): as passed to the op.

    Returns:
        dict: "o2_s" to its error; 1.0 or less is right.

    Raises:
        AssertionError: the output's shape or dtype is wrong.
    """
    return _ratios(_run_swiglu_forward(inputs, output, clamp_value))


def assert_swiglu_weighted(
    inputs: _Arrays, output: np.ndarray, clamp_value: float | None = None
) -> dict[str, float]:
    """As :func:`check_swiglu_weighted`, with an AssertionError where the error is above 1."""
    checked = _run_swiglu_forward(inputs, output, clamp_value)
    return _raise_past_bound(checked, lambda name, index: _describe_swiglu(inputs, index))


def _run_rmsnorm_forward(inputs, output, eps):
    arrays = (inputs[name] for name in ("x", "z", "weight"))
    return _run_forward("y", output, reference.cake_rmsnorm_silu_gate(*arrays, eps))


def check_rmsnorm_silu_gate(inputs: _Arrays, output: np.ndarray, eps: float = 1e-6) -> dict[str, float]:
    """Worst error of ``cake_rmsnorm_silu_gate``'s output, in units of its bound.

    Args:
        inputs (dict): "x", "z", "weight" (uint16 BF16 bits).
        output (array): y, uint16 BF16 bits.
        eps (float): as passed to the op.

    Returns:
        dict: "y" to its error; 1.0 or less is right.

    Raises:
        AssertionError: the output's shape or dtype is wrong.
    """
    return _ratios(_run_rmsnorm_forward(inputs, output, eps))


def assert_rmsnorm_silu_gate(inputs: _Arrays, output: np.ndarray, eps: float = 1e-6) -> dict[str, float]:
    """As :func:`check_rmsnorm_silu_gate`, with an AssertionError where the error is above 1."""

    def describe(name, index):
        found = {key: reference.to_float64(inputs[key][index]) for key in ("x", "z")}
        return {**found, "weight": reference.to_float64(inputs["weight"][index[-1]])}

    return _raise_past_bound(_run_rmsnorm_forward(inputs, output, eps), describe)


def _run_swiglu(inputs, outputs, clamp_value):
    arrays = [np.asarray(inputs[name]) for name in ("o1", "do2_s", "unzipped_probs")]
    o1, do2_s, probs = arrays
    checked = {
        "do1": _Output("do1", outputs["do1"], o1.shape, ("bfloat16",)),
        "probs_grad": _Output("probs_grad", outputs["probs_grad"], probs.shape, ("float32",)),
        "o2_s": _Output("o2_s", outputs["o2_s"], do2_s.shape, ("bfloat16",)),
    }
    for rows, block in reference.swiglu_blocks(*arrays, clamp_value):
        for name, output in checked.items():
            value, magnitudes = getattr(block, name), block.magnitudes[name]
            if name == "probs_grad":
                bound = promise3_bound(value, magnitudes, "float32")
            else:
                bound = promise1_bound(value, magnitudes)
            output.compare(rows, value, bound, magnitudes.nonfinite)
    return list(checked.values())


def check_swiglu_weighted_bwd(
    inputs: _Arrays, outputs: _Arrays, clamp_value: float | None = None
) -> dict[str, float]:
    """Worst errors of ``fused_swiglu_weighted_bwd``'s outputs, in units of their bounds.

    Args:
        inputs (dict): "o1", "do2_s" (uint16 BF16 bits), "unzipped_probs" (float32).
        outputs (dict): "do1", "o2_s" (uint16 BF16 bits), "probs_grad" (float32), NumPy arrays.
        clamp_value (float, optional): as passed to ``fused_swiglu_weighted_clamp_bwd``.

    Returns:
        dict: output name to error; 1.0 or less is right.

    Raises:
        AssertionError: an output's shape or dtype is wrong.
    """
    return _ratios(_run_swiglu(inputs, outputs, clamp_value))


def assert_swiglu_weighted_bwd(
    inputs: _Arrays, outputs: _Arrays, clamp_value: float | None = None
) -> dict[str, float]:
    """As :func:`check_swiglu_weighted_bwd`, with an AssertionError where an error is above 1.

    The message names the output, the index, what came, what was expected, the bound, and the
    inputs of that element.
    """

    def describe(name, index):
        o1, do2_s, probs = (
            reference.to_float64(inputs[key]) for key in ("o1", "do2_s", "unzipped_probs")
        )
        half = do2_s.shape[-1]
        if name == "probs_grad":
            row = index[: o1.ndim - 1]
            return {"prob": probs[index], "largest |gate|": np.abs(o1[row][:half]).max(initial=0)}
        return {**_describe_swiglu(inputs, index), "d": do2_s[index[:-1]][index[-1] % half]}

    return _raise_past_bound(_run_swiglu(inputs, outputs, clamp_value), describe)


def _run_rmsnorm(inputs, outputs, eps, initial_grad_weight, compute_grad_weight):
    arrays = [np.asarray(inputs[name]) for name in ("grad_out", "x", "z", "weight")]
    shape = arrays[1].shape
    grad_x = _Output("grad_x", outputs["grad_x"], shape, ("bfloat16",))
    grad_z = _Output("grad_z", outputs["grad_z"], shape, ("bfloat16",))
    checked = [grad_x, grad_z]
    if compute_grad_weight:
        grad_weight = _Output(
            "grad_weight", outputs["grad_weight"], arrays[3].shape, ("bfloat16", "float32")
        )
        checked.append(grad_weight)
    elif outputs["grad_weight"] is not None:
        raise AssertionError("grad_weight: expected None without compute_grad_weight")

    sums = []
    for rows, x_block, z_block, magnitudes, block_sums in reference.rmsnorm_blocks(*arrays, eps):
        for output, value in ((grad_x, x_block), (grad_z, z_block)):
            parts = magnitudes[output.name]
            output.compare(rows, value, promise1_bound(value, parts), parts.nonfinite)
        sums.append(block_sums)
    if compute_grad_weight:
        value, parts = reference.total_grad_weight(sums)
        if initial_grad_weight is not None:
            value = value + reference.to_float64(initial_grad_weight)
        bound = promise3_bound(value, parts, grad_weight.dtype)
        grad_weight.compare(slice(0, value.size), value, bound, parts.nonfinite)
    return checked


def check_rmsnorm_silu_gate_bwd(
    inputs: _Arrays,
    outputs: Mapping[str, np.ndarray | None],
    eps: float = 1e-6,
    initial_grad_weight: ArrayLike | None = None,
    compute_grad_weight: bool = True,
) -> dict[str, float]:
    """Worst errors of ``cake_rmsnorm_silu_gate_train_backward``'s outputs, in units of the bounds.

    Args:
        inputs (dict): "grad_out", "x", "z", "weight" (uint16 BF16 bits).
        outputs (dict): "grad_x", "grad_z" (uint16 BF16 bits), "grad_weight" (uint16 BF16 bits or
            float32), NumPy arrays.
        eps (float): as passed to the op.
        initial_grad_weight (array_like, optional): with accumulation, what grad_weight held.
        compute_grad_weight (bool): False: outputs["grad_weight"] has to be None.

    Returns:
        dict: output name to error; 1.0 or less is right.

    Raises:
        AssertionError: an output's shape or dtype is wrong.
    """
    checked = _run_rmsnorm(inputs, outputs, eps, initial_grad_weight, compute_grad_weight)
    return _ratios(checked)


def assert_rmsnorm_silu_gate_bwd(
    inputs: _Arrays,
    outputs: Mapping[str, np.ndarray | None],
    eps: float = 1e-6,
    initial_grad_weight: ArrayLike | None = None,
    compute_grad_weight: bool = True,
) -> dict[str, float]:
    """As :func:`check_rmsnorm_silu_gate_bwd`, with an AssertionError where an error is above 1.

    The message names the output, the index, what came, what was expected, the bound, and the
    inputs of that element.
    """

    def describe(name, index):
        if name == "grad_weight":
            found = {"weight": from_bf16_bits(inputs["weight"])[index]}
            if initial_grad_weight is not None:
                found["initial grad_weight"] = reference.to_float64(initial_grad_weight)[index]
            return found
        found = {
            key: reference.to_float64(inputs[key][index]) for key in ("grad_out", "x", "z")
        }
        found["weight"] = reference.to_float64(inputs["weight"][index[-1]])
        return found

    checked = _run_rmsnorm(inputs, outputs, eps, initial_grad_weight, compute_grad_weight)
    return _raise_past_bound(checked, describe)
