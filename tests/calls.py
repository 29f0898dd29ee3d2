"""Calls of both ops from NumPy arrays to NumPy arrays, for the test files. No Paddle compute kernel runs here."""

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import paddle

import paddle_gated_ops.incubate.nn.functional as F
from paddle_gated_ops import testing
from paddle_gated_ops.testing import tensor_of

SWIGLU_INPUTS = ("o1", "do2_s", "unzipped_probs")
RMSNORM_INPUTS = ("grad_out", "x", "z", "weight")


BAD_CLAMP_VALUES = [
    (0, ValueError),
    (0.0, ValueError),
    (-0.0, ValueError),
    (-1, ValueError),
    (float("nan"), ValueError),
    (float("inf"), ValueError),
    (float("-inf"), ValueError),
    (1e39, ValueError),
    (1e-60, ValueError),
    (True, TypeError),
    (False, TypeError),
    ("7", TypeError),
    ([7.0], TypeError),
    (1j, TypeError),
]


def array_of(tensor):
    """The bits of a contiguous BF16 tensor (uint16), the values of an FP32 one, None for None."""
    return None if tensor is None else testing.array_of(tensor)


def places_of(shape, strides):
    """Where each element of a view lies, counted in elements from its first one: an int64 array of the view's shape."""
    places = np.zeros((), np.int64)
    for size, stride in zip(shape, strides):
        places = np.add.outer(places, np.arange(size, dtype=np.int64) * stride)
    return places


def tensors_of(inputs, place, views=None):
    """Tensors by name; those named in ``views`` as strided views of that kind."""
    views = views or {}
    return {
        name: testing.strided_view(array, views[name], place)[0] if name in views else tensor_of(array, place)
        for name, array in inputs.items()
    }


def run_swiglu(inputs, place, views=None):
    """fused_swiglu_weighted_bwd: arrays do1, probs_grad, o2_s by name."""
    outputs = F.fused_swiglu_weighted_bwd(**tensors_of(inputs, place, views))
    return {name: array_of(tensor) for name, tensor in zip(("do1", "probs_grad", "o2_s"), outputs)}


def run_rmsnorm(inputs, place, views=None, **options):
    """cake_rmsnorm_silu_gate_train_backward: arrays grad_x, grad_z, grad_weight (or None) by name."""
    outputs = F.cake_rmsnorm_silu_gate_train_backward(**tensors_of(inputs, place, views), **options)
    return {name: array_of(tensor) for name, tensor in zip(("grad_x", "grad_z", "grad_weight"), outputs)}


# ---- The differentiable functions. They stand here by name, as to_static reads no variables of a closure in Paddle 2.6.

CLAMP = 0.75  # clamps gates and ups of magnitude 1 often enough


def swiglu_forward(o1, unzipped_probs):
    return F.fused_swiglu_weighted(o1, unzipped_probs)


def clamped_forward(o1, unzipped_probs):
    return F.fused_swiglu_weighted(o1, unzipped_probs, CLAMP)


def rmsnorm_forward(x, z, weight):
    return F.cake_rmsnorm_silu_gate(x, z, weight, 1e-5)


def _swiglu_gradients(tensors):
    return F.fused_swiglu_weighted_bwd(**tensors)[:2]


def _clamped_gradients(tensors):
    return F.fused_swiglu_weighted_clamp_bwd(**tensors, clamp_value=CLAMP)[:2]


def _rmsnorm_gradients(tensors):
    return F.cake_rmsnorm_silu_gate_train_backward(**tensors, eps=1e-5)


class Forward(NamedTuple):
    """A differentiable function, with the backward op that its gradients have to come from, bit for bit."""

    function: Callable
    entry: str  # the name of the C++ function that computes it
    inputs: tuple
    output_grad: str
    arrays: Callable  # of rows and seed; the gradient of the output included
    backward: Callable

    def gradients(self, arrays, place):
        """The gradients of all inputs by name, from the backward op."""
        return dict(zip(self.inputs, map(array_of, self.backward(tensors_of(arrays, place)))))

    def output(self, arrays, place):
        with paddle.no_grad():
            return array_of(self.function(*(tensor_of(arrays[name], place) for name in self.inputs)))

    def leaves(self, arrays, place, wanted=None):
        """Tensors by name; those of ``wanted`` (None: all) want a gradient."""
        tensors = {name: tensor_of(arrays[name], place) for name in self.inputs}
        for name, tensor in tensors.items():
            tensor.stop_gradient = wanted is not None and name not in wanted
        return tensors

    def subsets(self):
        """Every choice of inputs that want a gradient, but for none."""
        return [
            tuple(name for i, name in enumerate(self.inputs) if chosen >> i & 1)
            for chosen in range(1, 1 << len(self.inputs))
        ]


def _swiglu_arrays(rows, seed=0):
    return testing.swiglu_weighted_inputs(rows, 16, seed)


FORWARDS = {
    "swiglu": Forward(
        swiglu_forward, "fused_swiglu_weighted", SWIGLU_INPUTS[::2], "do2_s", _swiglu_arrays, _swiglu_gradients
    ),
    "clamped": Forward(
        clamped_forward, "fused_swiglu_weighted", SWIGLU_INPUTS[::2], "do2_s", _swiglu_arrays, _clamped_gradients
    ),
    "rmsnorm": Forward(
        rmsnorm_forward,
        "cake_rmsnorm_silu_gate",
        RMSNORM_INPUTS[1:],
        "grad_out",
        testing.rmsnorm_silu_gate_inputs,
        _rmsnorm_gradients,
    ),
}
EVERY_SUBSET = [(name, wanted) for name, forward in FORWARDS.items() for wanted in forward.subsets()]


def allocated():
    """The bytes of host memory that Paddle's tensors take."""
    from paddle.base import core

    return core.host_memory_stat_current_value("Allocated", 0)


def peak_of(call):
    """The most bytes of host memory that Paddle's tensors took during a call, beyond what they took before."""
    from paddle.base import core

    def peak():
        return core.host_memory_stat_peak_value("Allocated", 0)

    # Paddle 2.6 can't reset the peak: a filler takes the memory up to it, and it is then passed by every allocation.
    filler = paddle.empty([peak() - allocated()], "uint8") if peak() > allocated() else None
    before = allocated()
    assert peak() == before
    call()
    del filler
    return peak() - before


def backward_into(output, grad):
    """Runs autograd from an output with an explicit gradient: no kernel of Paddle's own is needed."""
    paddle.autograd.backward([output], [grad])


def assert_gradients(tensors, expected, wanted):
    """The leaves of ``wanted`` hold the expected gradients bit for bit, the others none."""
    for name, tensor in tensors.items():
        assert (tensor.grad is not None) == (name in wanted), name
    assert_same_bits({n: array_of(tensors[n].grad) for n in wanted}, {n: expected[n] for n in wanted})


def constant(name):
    """A constant of the gated RMSNorm's kernels, from their header."""
    header = Path(__file__).parents[1] / "ops/rmsnorm_silu_gate/rmsnorm_silu_gate.h"
    return int(re.search(rf"\b{name} = (\d+)\b", header.read_text()).group(1))


UNIT = constant("kUnitRows")  # rows of the gated RMSNorm whose weight gradients FP32 adds up; chunks of rows are whole units
ONE_CHUNK = UNIT * constant("kOneChunkUnits")  # the most rows that are one chunk
ONE_UNIT_CHUNKS = UNIT * constant("kFewChunks")  # the most rows whose chunks are one unit each
MANY_ROWS = constant("kManyRows")  # from here on there are more chunks, main ones and a tail


def exact_inputs(rows, terms):
    """Inputs whose every row adds exactly ``terms`` to the weight's gradient, at eps = 0.

    x of +-1 has an rstd of 1, and SiLU(128) is 128 in FP32.

    Args:
        rows (int): the number of rows.
        terms (float64 array): [128] or [rows, 128], BF16 numbers.
    """
    signs = np.where(np.arange(128) % 3 == 0, -1.0, 1.0)
    rows_of = {"grad_out": terms * signs / 128, "x": signs, "z": np.full(128, 128.0)}
    inputs = {name: testing.to_bf16_bits(np.broadcast_to(row, (rows, 128))) for name, row in rows_of.items()}
    return {**inputs, "weight": testing.to_bf16_bits(np.linspace(-2, 2, 128))}


def order_revealing_inputs(rows, seed=0):
    """Inputs of exactly known terms whose FP64 sum tells the order of its additions, at eps = 0.

    The first row of each unit has a term that another unit's cancels, of sizes from 2^-30 to 2^30: what is left of the
    sum is the rounding errors of FP64 alone.
    """
    generator = np.random.default_rng(seed)
    pairs = rows // UNIT // 2
    terms = generator.integers(128, 256, (pairs, 128)) * 2.0 ** generator.integers(-37, 24, (pairs, 128))
    every_row = np.zeros((rows, 128))
    every_row[: 2 * pairs * UNIT : UNIT] = generator.permuted(np.concatenate([terms, -terms]), axis=0)
    return exact_inputs(rows, every_row)


def raw(array):
    """The array's bytes as integers: -0 differs from 0, and a NaN equals itself."""
    return array if array.dtype == np.uint16 else np.ascontiguousarray(array).view(np.uint32)


def assert_same_bits(got, expected):
    """Two dicts of outputs have the same names, shapes, dtypes and bits."""
    assert got.keys() == expected.keys()
    for name, array in got.items():
        other = expected[name]
        assert (array is None) == (other is None), f"{name}: {'None' if array is None else 'not None'}"
        if other is None:
            continue
        assert (array.dtype, array.shape) == (other.dtype, other.shape), name
        differing = np.flatnonzero(raw(array).reshape(-1) != raw(other).reshape(-1))
        assert differing.size == 0, f"{name}: {differing.size} of {array.size} differ, the first at {differing[0]}"


def run_python(code, timeout=120, **environment):
    """Runs Python code in a process of its own, with tests/ importable; returns what it printed last.

    An environment value of None removes the variable.
    """
    env = dict(os.environ)
    here = os.path.dirname(os.path.abspath(__file__))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [here, env.get("PYTHONPATH")]))
    for name, value in environment.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else ""


@contextlib.contextmanager
def eager():
    """Eager mode in the midst of static mode."""
    paddle.disable_static()
    try:
        yield
    finally:
        paddle.enable_static()


def run_in_threads(work, count):
    """Runs work(0) to work(count - 1) at once, each in a thread of its own; fails where one raises or does not return."""
    errors = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:  # pytest does not see what a thread raises
            errors.append(error)

    workers = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert not any(worker.is_alive() for worker in workers), "a call did not return"
    assert not errors, errors[0]
