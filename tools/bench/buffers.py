"""Paddle's tensors of a case: as many sets of inputs and outputs as it takes to leave no cache anything."""

import ctypes
from typing import NamedTuple

import numpy as np
import paddle

from paddle_gated_ops import testing
from paddle_gated_ops._library import C
from paddle_gated_ops.incubate.nn import functional as F

from .arrays import make_inputs, repeated
from .cases import NORM_SIZE

_MEMCPY_DEFAULT = 4  # the pointers tell the direction


class Set(NamedTuple):
    """A call's tensors by the names that its function has for them."""

    inputs: dict
    outputs: dict


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


def _repeated_on_gpu(array, rows, skip):
    """arrays.repeated as a tensor; what is repeated is copied there once, and from there to there again and again."""
    array = np.ascontiguousarray(array)
    row = array.size // len(array)
    flat = paddle.empty([skip + rows * row], "bfloat16" if array.dtype == np.uint16 else "float32")
    # The CUDA runtime that the library is linked to: this Paddle's own kernels may have no code for this GPU.
    runtime = ctypes.CDLL(C.__file__)

    def copy(to, source, count):
        error = runtime.cudaMemcpy(ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(count), _MEMCPY_DEFAULT)
        if error:
            raise RuntimeError(f"cudaMemcpy: CUDA error {error}")

    paddle.device.synchronize()
    begin, size = flat.data_ptr() + skip * array.itemsize, rows * row * array.itemsize
    done = min(array.nbytes, size)
    copy(begin, array.ctypes.data, done)
    while done < size:
        more = min(done, size - done)
        copy(begin + done, begin, more)
        done += more
    runtime.cudaDeviceSynchronize()
    return flat


def make_sets(case, place, count, with_outputs):
    """The inputs as arrays, of arrays.make_inputs, and [Set] * count. Without outputs that dict is empty."""

    def make(array, rows, skip):
        on_cpu = place == "cpu"
        flat = testing.tensor_of(repeated(array, rows, skip), place) if on_cpu else _repeated_on_gpu(array, rows, skip)
        return flat[skip:].reshape([rows, *array.shape[1:]])

    arrays, inputs = make_inputs(case, count, make)
    found = _output_arrays(case, case.rows, count, place) if with_outputs else {}
    outputs = {name: testing.tensor_of(array, place) for name, array in found.items()}
    return arrays, [Set(inputs[i], {name: tensor[i] for name, tensor in outputs.items()}) for i in range(count)]
