"""Streams, devices and threads on a GPU: work goes where it belongs, and nobody waits."""

import contextlib
import ctypes
import functools
import threading

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import (
    RMSNORM_INPUTS,
    SWIGLU_INPUTS,
    array_of,
    assert_same_bits,
    run_in_threads,
    run_rmsnorm,
    run_swiglu,
    tensor_of,
    tensors_of,
)
from cuda_runtime import GPU, RMSNORM_OUTPUTS, SWIGLU_OUTPUTS, Delay, as_poison, named
from paddle_gated_ops import testing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

# ---- Streams


@pytest.fixture
def delay(cuda):
    return Delay(cuda)


@pytest.mark.parametrize("op", ["swiglu", "rmsnorm"])
@pytest.mark.parametrize("which", ["side stream", "current stream"])
def test_work_goes_to_the_current_stream_and_nobody_waits(cuda, delay, op, which):
    # The inputs arrive late on the stream. Work on another stream would read what is there before, NaN; a call that
    # waited for the stream would return to an idle one.
    if op == "swiglu":
        names, function, inputs = SWIGLU_OUTPUTS, F.fused_swiglu_weighted_bwd, testing.swiglu_weighted_inputs(200, 1408)
        expected = run_swiglu(inputs, GPU)
    else:
        names, function = RMSNORM_OUTPUTS, F.cake_rmsnorm_silu_gate_train_backward
        inputs = testing.rmsnorm_silu_gate_inputs(9000)
        expected = run_rmsnorm(inputs, GPU)
    source = tensors_of(inputs, GPU)
    target = tensors_of({name: as_poison(array) for name, array in inputs.items()}, GPU)
    stream = paddle.device.cuda.Stream() if which == "side stream" else paddle.device.cuda.current_stream()
    with paddle.device.cuda.stream_guard(stream) if which == "side stream" else contextlib.nullcontext():
        function(**target)  # what the first call on a stream loads and allocates is there then
        cuda.synchronize()
        delay.put_on(stream)
        for name, array in inputs.items():
            cuda.copy_on(stream, target[name].data_ptr(), source[name].data_ptr(), array.nbytes)
        outputs = function(**target)
        assert cuda.is_busy(stream), "the call waited for the stream"
        cuda.synchronize()
        assert not cuda.is_busy(stream)
        assert_same_bits(named(names, outputs), expected)


def test_calls_on_two_streams_at_once(cuda):
    # No scratch is shared: each call has a workspace of its own while both run.
    inputs = [testing.rmsnorm_silu_gate_inputs(100_000, seed=seed) for seed in range(2)]
    expected = [run_rmsnorm(arrays, GPU) for arrays in inputs]
    tensors = [tensors_of(arrays, GPU) for arrays in inputs]
    streams = [paddle.device.cuda.Stream() for _ in range(2)]
    cuda.synchronize()
    results = [[], []]
    for _ in range(6):
        for i, stream in enumerate(streams):
            with paddle.device.cuda.stream_guard(stream):
                results[i].append(F.cake_rmsnorm_silu_gate_train_backward(**tensors[i]))
    cuda.synchronize()
    for i in range(2):
        for outputs in results[i]:
            assert_same_bits(named(RMSNORM_OUTPUTS, outputs), expected[i])


@pytest.mark.parametrize("op", ["swiglu", "rmsnorm"])
def test_a_thousand_runs_with_other_work(cuda, delay, op):
    """Copies on one stream and calls of the other op on a third share the GPU with them."""
    swiglu, rmsnorm = testing.swiglu_weighted_inputs(300, 2056, seed=2), testing.rmsnorm_silu_gate_inputs(9001, seed=2)
    if op == "swiglu":
        names, run, function, inputs = SWIGLU_OUTPUTS, run_swiglu, F.fused_swiglu_weighted_bwd, swiglu
        other = functools.partial(F.cake_rmsnorm_silu_gate_train_backward, **tensors_of(rmsnorm, GPU))
    else:
        names, run, function, inputs = RMSNORM_OUTPUTS, run_rmsnorm, F.cake_rmsnorm_silu_gate_train_backward, rmsnorm
        other = functools.partial(F.fused_swiglu_weighted_bwd, **tensors_of(swiglu, GPU))
    expected, tensors = run(inputs, GPU), tensors_of(inputs, GPU)
    copies, others, own = (paddle.device.cuda.Stream() for _ in range(3))
    cuda.synchronize()
    for _ in range(20):
        results, kept = [], []
        delay.put_on(copies)
        for _ in range(50):
            with paddle.device.cuda.stream_guard(others):
                kept.append(other())
            with paddle.device.cuda.stream_guard(own):
                results.append(function(**tensors))
        cuda.synchronize()
        for outputs in results:
            assert_same_bits(named(names, outputs), expected)


@pytest.mark.parametrize("op", ["swiglu", "rmsnorm"])
def test_python_threads_on_their_own_streams(cuda, op):
    """Paddle's current stream is the process's, not the thread's: a lock keeps each guard together with its call."""
    if op == "swiglu":
        names, run, function = SWIGLU_OUTPUTS, run_swiglu, F.fused_swiglu_weighted_bwd
        inputs = [testing.swiglu_weighted_inputs(1000 + i, 2056, seed=i) for i in range(4)]
    else:
        names, run, function = RMSNORM_OUTPUTS, run_rmsnorm, F.cake_rmsnorm_silu_gate_train_backward
        inputs = [testing.rmsnorm_silu_gate_inputs(20_000 + i, seed=i) for i in range(4)]
    expected = [run(arrays, GPU) for arrays in inputs]
    tensors = [tensors_of(arrays, GPU) for arrays in inputs]
    streams = [paddle.device.cuda.Stream() for _ in inputs]
    results, lock = [[] for _ in inputs], threading.Lock()
    cuda.synchronize()

    def work(i):
        for _ in range(50):
            with lock, paddle.device.cuda.stream_guard(streams[i]):
                results[i].append(function(**tensors[i]))

    run_in_threads(work, len(inputs))
    cuda.synchronize()
    for i, each in enumerate(results):
        for outputs in each:
            assert_same_bits(named(names, outputs), expected[i])


# ---- Several devices

two_gpus = pytest.mark.skipif(
    not paddle.is_compiled_with_cuda() or paddle.device.cuda.device_count() < 2, reason="needs two GPUs"
)


@two_gpus
@pytest.mark.parametrize("current", ["gpu:0", "gpu:1", "cpu"])
@pytest.mark.parametrize("place", ["gpu:0", "gpu:1"])
def test_tensors_on_another_device_than_the_current_one(cuda, place, current):
    swiglu, rmsnorm = testing.swiglu_weighted_inputs(50, 264), testing.rmsnorm_silu_gate_inputs(9000)
    expected = run_swiglu(swiglu, "gpu:0"), run_rmsnorm(rmsnorm, "gpu:0")
    tensors = tensors_of(swiglu, place), tensors_of(rmsnorm, place)
    paddle.set_device(current)
    device = ctypes.c_int()
    cuda.call("cudaGetDevice", ctypes.byref(device))
    before = device.value
    first = F.fused_swiglu_weighted_bwd(**tensors[0])
    second = F.cake_rmsnorm_silu_gate_train_backward(**tensors[1])
    cuda.call("cudaGetDevice", ctypes.byref(device))
    assert device.value == before
    for tensor in (*first, *second):
        assert str(tensor.place) == str(tensors[0]["o1"].place)
    assert_same_bits(named(SWIGLU_OUTPUTS, first), expected[0])
    assert_same_bits(named(RMSNORM_OUTPUTS, second), expected[1])
    # And into the caller's own.
    outputs = {name: tensor_of(as_poison(array), place) for name, array in expected[0].items()}
    returned = F.fused_swiglu_weighted_bwd_out(**tensors[0], **outputs)
    assert all(tensor is outputs[name] for name, tensor in zip(SWIGLU_OUTPUTS, returned))
    assert_same_bits(named(SWIGLU_OUTPUTS, returned), expected[0])
    outputs = {name: tensor_of(as_poison(array), place) for name, array in expected[1].items()}
    floats = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(9000, place) // 4
    workspace = tensor_of(np.full(floats, np.nan, np.float32), place)
    returned = F.cake_rmsnorm_silu_gate_train_backward(**tensors[1], **outputs, workspace=workspace)
    assert_same_bits(named(RMSNORM_OUTPUTS, returned), expected[1])
    cuda.call("cudaGetDevice", ctypes.byref(device))
    assert device.value == before
    empty = F.cake_rmsnorm_silu_gate_train_backward(**tensors_of(testing.rmsnorm_silu_gate_inputs(0), place))
    assert not array_of(empty[2]).any()
    assert F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(9000, place) > 0


@two_gpus
@pytest.mark.parametrize("name", [*SWIGLU_INPUTS[1:], *RMSNORM_INPUTS[1:], *RMSNORM_OUTPUTS, "workspace"])
def test_tensors_on_two_devices(name):
    if name in SWIGLU_INPUTS:
        inputs, function = testing.swiglu_weighted_inputs(5, 8), F.fused_swiglu_weighted_bwd
    else:
        inputs, function = testing.rmsnorm_silu_gate_inputs(5), F.cake_rmsnorm_silu_gate_train_backward
    others = {"grad_weight": np.zeros(128, np.uint16), "workspace": np.zeros(1 << 16, np.float32)}
    array = inputs.get(name, others.get(name, np.zeros((5, 128), np.uint16)))
    with pytest.raises(ValueError, match=rf": {name} must be on"):
        function(**{**tensors_of(inputs, "gpu:0"), name: tensor_of(array, "gpu:1")})


# ---- Errors and empty calls leave nothing behind (the fixture asks CUDA after each test)


def test_after_refused_and_empty_calls():
    tensors = tensors_of(testing.rmsnorm_silu_gate_inputs(5), GPU)
    for _ in range(3):
        with pytest.raises(ValueError, match="weight"):
            F.cake_rmsnorm_silu_gate_train_backward(**{**tensors, "weight": tensors["x"]})
        F.cake_rmsnorm_silu_gate_train_backward(**tensors_of(testing.rmsnorm_silu_gate_inputs(0), GPU))
        F.fused_swiglu_weighted_bwd(**tensors_of(testing.swiglu_weighted_inputs((4, 0), 8), GPU))
        F.fused_swiglu_weighted_bwd(**tensors_of(testing.swiglu_weighted_inputs(4, 0), GPU))
    inputs = testing.swiglu_weighted_inputs(5, 24)
    testing.assert_swiglu_weighted_bwd(inputs, run_swiglu(inputs, GPU))
