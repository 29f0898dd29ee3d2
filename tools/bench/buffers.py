"""The tensors of a case: as many sets of inputs and outputs as it takes to leave no cache anything."""

from typing import NamedTuple

import numpy as np
from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn import functional as F

from .cases import NORM_SIZE

_BLOCK_ELEMENTS = 1 << 21  # as many random numbers are drawn; larger tensors repeat them
_PACKED, _PACKED_AT = 4 * NORM_SIZE, NORM_SIZE  # a packed projection's columns, and where z begins


class Set(NamedTuple):
    """A call's tensors by the names that its function has for them."""

    inputs: dict
    outputs: dict


def _arrays(case, rows):
    """Fresh random inputs of that many rows: NumPy arrays, BF16 as uint16 bits."""
    drawn = max(1, min(rows, _BLOCK_ELEMENTS // case.columns))
    if case.is_swiglu:
        arrays = testing.swiglu_weighted_inputs(drawn, case.columns, seed=None)
    else:
        arrays = testing.rmsnorm_silu_gate_inputs(drawn, seed=None)
    for unused in {"swiglu_weighted": ["do2_s"], "rmsnorm_silu_gate": ["grad_out"]}.get(case.op, []):
        del arrays[unused]
    return {name: a if name == "weight" else np.resize(a, (rows, *a.shape[1:])) for name, a in arrays.items()}


def _tensor(case, name, array, place):
    make = testing.bf16_tensor if array.dtype == np.uint16 else testing.float_tensor
    if case.layout == "unaligned" and name == "o1":
        flat = np.empty(array.size + 1, np.uint16)
        flat[0], flat[1:] = 0, array.ravel()
        return make(flat, place)[1:].reshape(array.shape)
    if case.layout == "sliced" and name == "z":
        packed = np.zeros((len(array), _PACKED), np.uint16)
        packed[:, _PACKED_AT : _PACKED_AT + NORM_SIZE] = array
        return make(packed, place)[:, _PACKED_AT : _PACKED_AT + NORM_SIZE]
    return make(array, place)


def _output_arrays(case, rows):
    """What the outputs hold before they are written: NaN."""

    def bf16(columns):
        return np.full((rows, columns), 0x7FC0, np.uint16)

    if case.op == "swiglu_weighted_bwd":
        probs_grad = np.full(rows, np.nan, np.float32)
        return {"do1": bf16(2 * case.columns), "probs_grad": probs_grad, "o2_s": bf16(case.columns)}
    if case.op == "rmsnorm_silu_gate_bwd":
        return {"grad_x": bf16(NORM_SIZE), "grad_z": bf16(NORM_SIZE)}
    if case.op == "rmsnorm_silu_gate":
        return {"out": bf16(NORM_SIZE)}
    return {}


def make_sets(case, place, count, with_outputs):
    """(arrays of the first set's inputs, [Set] * count). Sets are views of one tensor a name.

    Without outputs, or of an op whose function takes none, their dict is empty.
    """
    rows = case.rows
    arrays = _arrays(case, rows * count)
    whole = Set(
        {name: _tensor(case, name, array, place) for name, array in arrays.items()},
        {name: _tensor(case, name, array, place) for name, array in _output_arrays(case, rows * count).items()}
        if with_outputs
        else {},
    )

    def cut(tensors, i):
        return {name: t if name == "weight" else t[i * rows : (i + 1) * rows] for name, t in tensors.items()}

    sets = [Set(cut(whole.inputs, i), cut(whole.outputs, i)) for i in range(count)]
    if with_outputs and case.op == "rmsnorm_silu_gate_bwd":
        floats = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows, place) // 4
        floats += -floats % 2  # FP64 inside: each workspace begins as the first one does
        workspaces = testing.float_tensor(np.zeros((count, floats), np.float32), place)
        weights = testing.bf16_tensor(np.full((count, NORM_SIZE), 0x7FC0, np.uint16), place)
        for i in range(count):
            sets[i].outputs.update(grad_weight=weights[i], workspace=workspaces[i])
    return {name: a if name == "weight" else a[:rows] for name, a in arrays.items()}, sets
