"""Fresh random inputs of a case as NumPy arrays, and as any library's tensors. Neither Paddle nor PyTorch."""

import numpy as np

from .cases import NORM_SIZE
from .oracle import testing

_PACKED, _PACKED_AT = 4 * NORM_SIZE, NORM_SIZE  # the columns of a packed projection, and where z begins


def _random(case, rows):
    drawn = min(rows, case.period)
    if case.is_swiglu:
        arrays = testing.swiglu_weighted_inputs(drawn, case.columns, seed=None)
    else:
        arrays = testing.rmsnorm_silu_gate_inputs(drawn, seed=None)
    unused = {"swiglu_weighted": "do2_s", "rmsnorm_silu_gate": "grad_out"}.get(case.op)
    return {name: array for name, array in arrays.items() if name != unused}


def _in_layout(case, name, array, rows, make):
    if name == "weight":
        return make(array, len(array), 0)
    if case.layout == "unaligned" and name == "o1":
        return make(array, rows, 1)
    if case.layout == "sliced" and name == "z":
        packed = np.zeros((len(array), _PACKED), np.uint16)
        packed[:, _PACKED_AT : _PACKED_AT + NORM_SIZE] = array
        return make(packed, rows, 0)[:, _PACKED_AT : _PACKED_AT + NORM_SIZE]
    return make(array, rows, 0)


def repeated(array, rows, skip=0):
    """``skip`` zeros and then ``rows`` rows, those of ``array`` over and over, flat."""
    times, rest = divmod(rows, len(array))
    row = array.size // len(array)
    flat = np.empty(skip + rows * row, array.dtype)
    flat[:skip] = 0
    flat[skip : skip + times * array.size].reshape(times, -1)[:] = array.ravel()
    flat[skip + times * array.size :] = array[:rest].ravel()
    return flat


def make_inputs(case, count, make, probs=None):
    """Inputs for ``count`` calls, views of one tensor a name.

    Args:
        make: of an array (uint16, BF16 bits, or float32), a number of rows and 0 or 1, returns a tensor: so many rows, the
            array's over and over, which begin so many elements after an allocation does.
        probs (float, optional): every probability, in place of random ones.

    Returns:
        tuple: arrays by name, whose rows are the first call's, over and over where it has more; and a list of all calls'
        tensors by name.
    """
    rows = case.rows * count
    arrays = _random(case, rows)
    if probs is not None:
        arrays["unzipped_probs"][:] = probs
    tensors = {name: _in_layout(case, name, array, rows, make) for name, array in arrays.items()}

    def of_call(i):
        of_rows = slice(i * case.rows, (i + 1) * case.rows)
        return {name: tensor if name == "weight" else tensor[of_rows] for name, tensor in tensors.items()}

    return arrays, [of_call(i) for i in range(count)]
