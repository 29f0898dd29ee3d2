"""Paddle's tensors of a case: as many sets of inputs and outputs as it takes to leave no cache anything."""

from typing import NamedTuple

import numpy as np

from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn import functional as F

from .arrays import make_inputs
from .cases import NORM_SIZE


class Set(NamedTuple):
    """A call's tensors by the names that its function has for them."""

    inputs: dict
    outputs: dict


def array_of(tensor):
    """The bits of a contiguous BF16 tensor (uint16), the values of an FP32 one."""
    return testing.bits_of(tensor) if "bfloat16" in str(tensor.dtype) else testing.floats_of(tensor)


def _output_arrays(case, rows, count, place):
    """What the outputs hold before they are written, NaN: [count, ...] by name. None where no function takes them."""

    def bf16(*shape):
        return np.full((count, *shape), 0x7FC0, np.uint16)

    if case.op == "swiglu_weighted_bwd":
        probs_grad = np.full((count, rows), np.nan, np.float32)
        return {"do1": bf16(rows, 2 * case.columns), "probs_grad": probs_grad, "o2_s": bf16(rows, case.columns)}
    if case.op == "rmsnorm_silu_gate":
        return {"out": bf16(rows, NORM_SIZE)}
    if case.op == "rmsnorm_silu_gate_bwd":
        floats = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows, place) // 4
        floats += -floats % 2  # FP64 inside: each workspace begins as the first one does
        workspace = np.full((count, floats), np.nan, np.float32)
        big = {"grad_x": bf16(rows, NORM_SIZE), "grad_z": bf16(rows, NORM_SIZE)}
        return {**big, "grad_weight": bf16(NORM_SIZE), "workspace": workspace}
    return {}


def make_sets(case, place, count, with_outputs):
    """The first set's inputs as arrays, and [Set] * count. Without outputs that dict is empty."""

    def make(array):
        return testing.bf16_tensor(array, place) if array.dtype == np.uint16 else testing.float_tensor(array, place)

    arrays, inputs = make_inputs(case, count, make)
    found = _output_arrays(case, case.rows, count, place) if with_outputs else {}
    outputs = {name: make(array) for name, array in found.items()}
    return arrays, [Set(inputs[i], {name: tensor[i] for name, tensor in outputs.items()}) for i in range(count)]
