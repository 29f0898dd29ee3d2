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
    return {
        name: array if name == "weight" else np.resize(array, (rows, *array.shape[1:]))
        for name, array in arrays.items()
        if name != unused
    }


def _in_layout(case, name, array, make):
    if case.layout == "unaligned" and name == "o1":
        flat = np.zeros(array.size + 1, np.uint16)
        flat[1:] = array.ravel()
        return make(flat)[1:].reshape(list(array.shape))
    if case.layout == "sliced" and name == "z":
        packed = np.zeros((len(array), _PACKED), np.uint16)
        packed[:, _PACKED_AT : _PACKED_AT + NORM_SIZE] = array
        return make(packed)[:, _PACKED_AT : _PACKED_AT + NORM_SIZE]
    return make(array)


def make_inputs(case, count, make, probs=None):
    """Inputs for ``count`` calls, views of one tensor a name.

    Args:
        make: of an array, uint16 (BF16 bits) or float32, returns a tensor.
        probs (float, optional): every probability, in place of random ones.

    Returns:
        tuple: the first call's inputs as arrays by name, and a list of all calls' as tensors by name.
    """
    arrays = _random(case, case.rows * count)
    if probs is not None:
        arrays["unzipped_probs"][:] = probs
    tensors = {name: _in_layout(case, name, array, make) for name, array in arrays.items()}

    def of_call(values, i):
        rows = slice(i * case.rows, (i + 1) * case.rows)
        return {name: value if name == "weight" else value[rows] for name, value in values.items()}

    return of_call(arrays, 0), [of_call(tensors, i) for i in range(count)]
