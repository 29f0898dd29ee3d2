"""CUDA graphs, and the differentiable functions on a GPU: captured once, replayed with other contents."""

import ctypes
from functools import partial

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import (
    FORWARDS,
    array_of,
    assert_gradients,
    assert_same_bits,
    backward_into,
    run_rmsnorm,
    run_swiglu,
    tensor_of,
    tensors_of,
)
from cuda_runtime import GPU, RMSNORM_OUTPUTS, SWIGLU_OUTPUTS, as_poison, capture, captured, named
from paddle_gated_ops import testing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

# ---- CUDA graphs


def replays(cuda, graph, tensors, make_inputs):
    """Replays the graph on new inputs, written into its tensors, and yields them each time."""
    for seed in (1, 2, 3):
        inputs = make_inputs(seed=seed)
        for name, tensor in tensors.items():
            cuda.upload(tensor, inputs[name])
        graph.replay()
        cuda.synchronize()
        yield inputs
    graph.reset()


@pytest.mark.parametrize("rows, width", [(300, 1408), (65537, 8), (7, 101)])
def test_swiglu_in_a_cuda_graph(cuda, rows, width):
    tensors = tensors_of(testing.swiglu_weighted_inputs(rows, width, seed=0), GPU)
    F.fused_swiglu_weighted_bwd(**tensors)
    cuda.synchronize()
    with captured() as graph:
        outputs = F.fused_swiglu_weighted_bwd(**tensors)
    for inputs in replays(cuda, graph, tensors, partial(testing.swiglu_weighted_inputs, rows, width)):
        assert_same_bits(named(SWIGLU_OUTPUTS, outputs), run_swiglu(inputs, GPU))


@pytest.mark.parametrize("passed", [False, True], ids=["new outputs", "passed outputs"])
@pytest.mark.parametrize("rows", [1, 40, 100, 20000])
def test_rmsnorm_in_a_cuda_graph(cuda, rows, passed):
    tensors = tensors_of(testing.rmsnorm_silu_gate_inputs(rows, seed=0), GPU)
    options = {}
    if passed:
        floats = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows, GPU) // 4
        options = {name: tensor_of(np.full((rows, 128), 0x7FC0, np.uint16), GPU) for name in ("grad_x", "grad_z")}
        options["grad_weight"] = tensor_of(np.full(128, 0x7FC0, np.uint16), GPU)
        options["workspace"] = tensor_of(np.full(floats, np.nan, np.float32), GPU)
    F.cake_rmsnorm_silu_gate_train_backward(**tensors, **options)
    cuda.synchronize()
    with captured() as graph:
        outputs = F.cake_rmsnorm_silu_gate_train_backward(**tensors, **options)
    for inputs in replays(cuda, graph, tensors, partial(testing.rmsnorm_silu_gate_inputs, rows)):
        assert_same_bits(named(RMSNORM_OUTPUTS, outputs), run_rmsnorm(inputs, GPU))


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_accumulation_in_a_cuda_graph(cuda, dtype):
    rows = 9000
    tensors = tensors_of(testing.rmsnorm_silu_gate_inputs(rows, seed=0), GPU)
    grad_weight, expected = (tensor_of(np.zeros(128, dtype), GPU) for _ in range(2))
    options = dict(grad_weight=grad_weight, accumulate_grad_weight=True)
    F.cake_rmsnorm_silu_gate_train_backward(**tensors, **options)
    cuda.upload(grad_weight, np.zeros(128, dtype))
    with captured() as graph:
        F.cake_rmsnorm_silu_gate_train_backward(**tensors, **options)
    for inputs in replays(cuda, graph, tensors, partial(testing.rmsnorm_silu_gate_inputs, rows)):
        run_rmsnorm(inputs, GPU, grad_weight=expected, accumulate_grad_weight=True)
        cuda.synchronize()
        np.testing.assert_array_equal(array_of(grad_weight), array_of(expected))


def test_empty_rows_in_a_cuda_graph(cuda):
    tensors = tensors_of(testing.rmsnorm_silu_gate_inputs(0), GPU)
    grad_weight = tensor_of(np.ones(128, np.float32), GPU)
    F.cake_rmsnorm_silu_gate_train_backward(**tensors, grad_weight=grad_weight)
    cuda.synchronize()
    with captured() as graph:
        F.cake_rmsnorm_silu_gate_train_backward(**tensors, grad_weight=grad_weight)
    cuda.upload(grad_weight, np.ones(128, np.float32))
    graph.replay()
    cuda.synchronize()
    np.testing.assert_array_equal(array_of(grad_weight), np.zeros(128, np.float32))
    graph.reset()


# ---- Graphs of the runtime's own: with outputs and workspace given, nothing but the kernels


SWIGLU_LIKE = dict(zip(SWIGLU_OUTPUTS, ("o1", "unzipped_probs", "do2_s")))
RMSNORM_LIKE = {"grad_x": "x", "grad_z": "z", "grad_weight": "weight"}


def in_own_memory(op, rows, seed=0):
    """A call of the op into given outputs and workspace: inputs and outputs by name, and what makes the call."""
    if op == "swiglu":
        inputs, like = testing.swiglu_weighted_inputs(rows, 264, seed=seed), SWIGLU_LIKE
        function, options = F.fused_swiglu_weighted_bwd_out, {}
    elif op == "train forward":
        inputs, like = testing.rmsnorm_silu_gate_inputs(rows, seed=seed), {"out": "x"}
        inputs.pop("grad_out")
        function, options = F.cake_rmsnorm_silu_gate_train_forward, {}
    else:
        inputs, like = testing.rmsnorm_silu_gate_inputs(rows, seed=seed), RMSNORM_LIKE
        floats = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows, GPU) // 4
        function = F.cake_rmsnorm_silu_gate_train_backward
        options = {"workspace": tensor_of(np.zeros(floats, np.float32), GPU)}
        if op == "accumulate":
            options["accumulate_grad_weight"] = True
    tensors = tensors_of(inputs, GPU)
    outputs = {name: tensor_of(as_poison(inputs[other]), GPU) for name, other in like.items()}
    if op == "accumulate":
        outputs["grad_weight"] = tensor_of(np.zeros(128, np.float32), GPU)
    return tensors, outputs, lambda: function(**tensors, **outputs, **options)


def expected_of(op, rows, seed, total):
    """The same from an ordinary call; ``total`` holds the sums of the calls before."""
    if op == "swiglu":
        return run_swiglu(testing.swiglu_weighted_inputs(rows, 264, seed=seed), GPU)
    inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=seed)
    if op == "train forward":
        x, z, weight = (tensor_of(inputs[name], GPU) for name in ("x", "z", "weight"))
        return {"out": array_of(F.cake_rmsnorm_silu_gate(x, z, weight))}
    return run_rmsnorm(inputs, GPU, **(dict(grad_weight=total, accumulate_grad_weight=True) if op == "accumulate" else {}))


def new_contents(cuda, op, tensors, rows, seed):
    swiglu, rmsnorm = testing.swiglu_weighted_inputs, testing.rmsnorm_silu_gate_inputs
    arrays = swiglu(rows, 264, seed=seed) if op == "swiglu" else rmsnorm(rows, seed=seed)
    for name, tensor in tensors.items():
        cuda.upload(tensor, arrays[name])


@pytest.mark.parametrize("op, rows, kernels", [
    ("swiglu", 300, 1), ("rmsnorm", 1, 1), ("rmsnorm", 9000, 2), ("accumulate", 9000, 2), ("train forward", 300, 1),
])
def test_nothing_but_kernels_is_captured(cuda, op, rows, kernels):
    tensors, outputs, call = in_own_memory(op, rows)
    stream = paddle.device.cuda.Stream()
    with paddle.device.cuda.stream_guard(stream):
        call()  # what the first call on a stream loads is there then
        cuda.synchronize()
    if op == "accumulate":
        cuda.upload(outputs["grad_weight"], np.zeros(128, np.float32))
    total = tensor_of(np.zeros(128, np.float32), GPU)
    # A filler up to the most that there ever was: each allocation would now be a new peak.
    missing = paddle.device.cuda.max_memory_allocated(0) - paddle.device.cuda.memory_allocated(0)
    filler = paddle.empty([missing], "uint8") if missing else None
    memory = paddle.device.cuda.memory_allocated(0), paddle.device.cuda.max_memory_allocated(0)
    graph = capture(cuda, stream, call)
    assert (paddle.device.cuda.memory_allocated(0), paddle.device.cuda.max_memory_allocated(0)) == memory
    del filler
    assert graph.node_types() == [0] * kernels
    for seed in (1, 2, 3):
        new_contents(cuda, op, tensors, rows, seed)
        graph.launch(stream)
        cuda.synchronize()
        assert_same_bits({name: array_of(tensor) for name, tensor in outputs.items()}, expected_of(op, rows, seed, total))
    graph.destroy()


def test_several_streams_in_one_capture(cuda):
    """Both ops on a stream each, which forks from the captured one and joins it again."""
    first, second = paddle.device.cuda.Stream(), paddle.device.cuda.Stream()
    swiglu, rmsnorm = in_own_memory("swiglu", 300), in_own_memory("rmsnorm", 9000)
    for stream, (_, _, call) in ((first, swiglu), (second, rmsnorm)):
        with paddle.device.cuda.stream_guard(stream):
            call()
    cuda.synchronize()
    events = [ctypes.c_void_p() for _ in range(2)]
    for event in events:
        cuda.call("cudaEventCreateWithFlags", ctypes.byref(event), 2)  # without timing

    def after(stream, event, other):
        cuda.call("cudaEventRecord", event, ctypes.c_void_p(stream.cuda_stream))
        cuda.call("cudaStreamWaitEvent", ctypes.c_void_p(other.cuda_stream), event, 0)

    def work():
        after(first, events[0], second)
        swiglu[2]()
        with paddle.device.cuda.stream_guard(second):
            rmsnorm[2]()
        after(second, events[1], first)

    graph = capture(cuda, first, work)
    assert graph.node_types() == [0] * 3
    for seed in (1, 2, 3):
        for op, rows, (tensors, _, _) in (("swiglu", 300, swiglu), ("rmsnorm", 9000, rmsnorm)):
            new_contents(cuda, op, tensors, rows, seed)
        graph.launch(first)
        cuda.synchronize()
        for op, rows, (_, outputs, _) in (("swiglu", 300, swiglu), ("rmsnorm", 9000, rmsnorm)):
            assert_same_bits({n: array_of(t) for n, t in outputs.items()}, expected_of(op, rows, seed, None))
    graph.destroy()
    for event in events:
        cuda.call("cudaEventDestroy", event)


# ---- The differentiable functions: in eager mode, under recompute, in a CUDA graph


def test_swiglu_at_many_sizes():
    for rows, width in ((300, 1408), (65537, 8), (7, 101), (5, 3586)):
        inputs = testing.swiglu_weighted_inputs(rows, width, seed=rows)
        o1, probs, do2_s = (tensor_of(inputs[name], GPU) for name in ("o1", "unzipped_probs", "do2_s"))
        for clamp_value in (None, 0.75):
            testing.assert_swiglu_weighted(inputs, array_of(F.fused_swiglu_weighted(o1, probs, clamp_value)), clamp_value)
        outputs = named(SWIGLU_OUTPUTS, F.fused_swiglu_weighted_clamp_bwd(o1, do2_s, probs, 0.75))
        testing.assert_swiglu_weighted_bwd(inputs, outputs, 0.75)


def test_rmsnorm_at_many_sizes():
    for rows in (1, 40, 20000, 65537):
        inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=rows)
        x, z, weight = (tensor_of(inputs[name], GPU) for name in ("x", "z", "weight"))
        testing.assert_rmsnorm_silu_gate(inputs, array_of(F.cake_rmsnorm_silu_gate(x, z, weight)))


@pytest.mark.parametrize("how", ["eager", "recompute, reentrant", "recompute, not reentrant"])
@pytest.mark.parametrize("name", FORWARDS)
def test_forward_and_backward(name, how):
    from paddle.distributed.fleet.utils import recompute

    forward = FORWARDS[name]
    arrays = forward.arrays(20000, seed=1)
    leaves = forward.leaves(arrays, GPU)
    if how == "eager":
        output = forward.function(**leaves)
    else:
        options = dict(use_reentrant="not" not in how, preserve_rng_state=False)
        output = recompute(forward.function, *leaves.values(), **options)
    backward_into(output, tensor_of(arrays[forward.output_grad], GPU))
    np.testing.assert_array_equal(array_of(output.detach()), forward.output(arrays, GPU))
    assert_gradients(leaves, forward.gradients(arrays, GPU), forward.inputs)


@pytest.mark.parametrize("rows", [1, 300, 20000])
@pytest.mark.parametrize("name", FORWARDS)
def test_forward_and_backward_in_a_cuda_graph(cuda, name, rows):
    forward = FORWARDS[name]
    arrays = forward.arrays(rows, seed=0)
    leaves, grad = forward.leaves(arrays, GPU), tensor_of(arrays[forward.output_grad], GPU)

    def step():
        output = forward.function(**leaves)
        return output, paddle.grad([output], list(leaves.values()), [grad])

    step()
    cuda.synchronize()
    with captured() as graph:
        output, grads = step()
    for arrays in replays(cuda, graph, {**leaves, forward.output_grad: grad}, partial(forward.arrays, rows)):
        np.testing.assert_array_equal(array_of(output.detach()), forward.output(arrays, GPU))
        assert_same_bits(dict(zip(leaves, map(array_of, grads))), forward.gradients(arrays, GPU))


def test_results_in_the_inputs_memory_in_a_cuda_graph(cuda):
    tensors = tensors_of(testing.swiglu_weighted_inputs(300, 1408, seed=0), GPU)

    def step():
        return F.fused_swiglu_weighted_bwd_out(**tensors, do1=tensors["o1"], o2_s=tensors["do2_s"])

    step()
    cuda.synchronize()
    with captured() as graph:
        outputs = step()
    for inputs in replays(cuda, graph, tensors, partial(testing.swiglu_weighted_inputs, 300, 1408)):
        assert_same_bits(named(SWIGLU_OUTPUTS, outputs), run_swiglu(inputs, GPU))


def test_train_forward_in_the_inputs_memory_in_a_cuda_graph(cuda):
    tensors = tensors_of({n: a for n, a in testing.rmsnorm_silu_gate_inputs(9000).items() if n != "grad_out"}, GPU)
    F.cake_rmsnorm_silu_gate_train_forward(**tensors, out=tensors["z"])
    cuda.synchronize()
    with captured() as graph:
        F.cake_rmsnorm_silu_gate_train_forward(**tensors, out=tensors["z"])
    for inputs in replays(cuda, graph, tensors, partial(testing.rmsnorm_silu_gate_inputs, 9000)):
        testing.assert_rmsnorm_silu_gate(inputs, array_of(tensors["z"]))


def test_main_grad():
    from paddle.base.framework import EagerParamBase

    inputs = testing.rmsnorm_silu_gate_inputs(9000)
    weight = EagerParamBase.from_tensor(tensor_of(inputs["weight"], GPU))
    weight.stop_gradient = False
    weight.main_grad = tensor_of(np.zeros(128, np.float32), GPU)
    for _ in range(3):
        before = array_of(weight.main_grad)
        x, z = (tensor_of(inputs[name], GPU) for name in ("x", "z"))
        x.stop_gradient = z.stop_gradient = False
        backward_into(F.cake_rmsnorm_silu_gate(x, z, weight), tensor_of(inputs["grad_out"], GPU))
        assert weight.grad is None
        outputs = dict(zip(RMSNORM_OUTPUTS, map(array_of, (x.grad, z.grad, weight.main_grad))))
        testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs, initial_grad_weight=before)
