"""Whether both ops are right on the machine at hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from . import testing
from ._library import C, build_info
from ._threads import get_num_threads
from ._version import __version__
from .incubate.nn import functional as F


def run_check() -> dict[str, dict[str, float]]:
    """Runs both ops on the CPU and on each GPU, compares every result with float64, and prints what it found.

    The way of ``paddle.utils.run_check()``. It takes a few seconds.

    Returns:
        dict: for each place ('cpu', 'gpu:0', ...) the largest error of each result, in units of the promised bound;
        1.0 or less is right.

    Raises:
        AssertionError: a result misses its bound; the message names the op, the result and the element.
        RuntimeError: a GPU could not run an op: the library is built for other GPUs, say.
    """
    print(f"paddle_gated_ops {__version__}, Paddle {paddle.__version__}, {get_num_threads()} CPU thread(s)")
    places: dict[str, Any] = {"cpu": paddle.CPUPlace()}
    if C.with_cuda:
        print(f"GPU code: {', '.join(build_info()['gpu_code'])}")
        places.update((f"gpu:{i}", paddle.CUDAPlace(i)) for i in range(paddle.device.cuda.device_count()))
    worst: dict[str, dict[str, float]] = {}
    for name, place in places.items():
        worst[name] = {**_check_swiglu_weighted(place), **_check_rmsnorm_silu_gate(place)}
        errors = ", ".join(f"{output} {error:.2f}" for output, error in worst[name].items())
        print(f"{name}: both ops are right; largest errors in units of the promised bound: {errors}")
    if paddle.is_compiled_with_cuda() and len(places) == 1:
        print("Paddle finds no GPU here: checked on the CPU alone.")
    return worst


def _merge(worst, errors):
    return {name: max(error, worst.get(name, 0.0)) for name, error in errors.items()}


def _check_swiglu_weighted(place):
    worst = {}
    for rows, intermediate_size in ((33, 2048), (257, 768), (7, 101)):  # vectors of 8 columns, and a width that has none
        inputs = testing.swiglu_weighted_inputs(rows, intermediate_size)
        do1, probs_grad, o2_s = F.fused_swiglu_weighted_bwd(
            testing.bf16_tensor(inputs["o1"], place),
            testing.bf16_tensor(inputs["do2_s"], place),
            testing.float_tensor(inputs["unzipped_probs"], place),
        )
        outputs = {"do1": testing.bits_of(do1), "probs_grad": testing.floats_of(probs_grad), "o2_s": testing.bits_of(o2_s)}
        worst = _merge(worst, testing.assert_swiglu_weighted_bwd(inputs, outputs))
    return worst


def _check_rmsnorm_silu_gate(place):
    worst = {}
    for rows in (5, 1000, 20000):  # one chunk of rows, several, and several units of rows in a chunk
        inputs = testing.rmsnorm_silu_gate_inputs(rows)
        tensors = [testing.bf16_tensor(inputs[name], place) for name in ("grad_out", "x", "z", "weight")]
        grad_weight = testing.float_tensor(np.full(128, np.nan, np.float32), place)
        grad_x, grad_z, _ = F.cake_rmsnorm_silu_gate_train_backward(*tensors, grad_weight=grad_weight)
        outputs = {
            "grad_x": testing.bits_of(grad_x),
            "grad_z": testing.bits_of(grad_z),
            "grad_weight": testing.floats_of(grad_weight),
        }
        worst = _merge(worst, testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs))
    return worst
