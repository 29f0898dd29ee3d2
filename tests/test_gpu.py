"""What only a GPU can show: CUDA graphs, streams, devices, and tensors past 2^31 elements.

The other files run on the GPU too. As there, no compute kernel of Paddle runs here: tensors come from the host, and
what moves on the device moves through the CUDA runtime.
"""

import contextlib
import ctypes

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import (
    FORWARDS,
    RMSNORM_INPUTS,
    SWIGLU_INPUTS,
    array_of,
    assert_gradients,
    assert_same_bits,
    backward_into,
    run_rmsnorm,
    run_swiglu,
    tensor_of,
    tensors_of,
)
from paddle_gated_ops import testing
from paddle_gated_ops._library import C
from paddle_gated_ops.testing import reference

pytestmark = pytest.mark.gpu

GPU = "gpu:0"
SWIGLU_OUTPUTS = ("do1", "probs_grad", "o2_s")
RMSNORM_OUTPUTS = ("grad_x", "grad_z", "grad_weight")
NOT_READY = 600  # cudaErrorNotReady
DEFAULT = 4  # cudaMemcpyDefault: the pointers tell the direction


class Cuda:
    """The CUDA runtime that the library is linked to."""

    def __init__(self):
        self.runtime = ctypes.CDLL(C.__file__)

    def call(self, name, *arguments):
        error = getattr(self.runtime, name)(*arguments)
        assert error == 0, f"{name}: CUDA error {error}"

    def synchronize(self):
        paddle.device.cuda.synchronize()
        self.call("cudaDeviceSynchronize")

    def copy(self, to, source, count):
        """Copies bytes between addresses of host and device, once all work is done."""
        self.synchronize()
        self.call("cudaMemcpy", ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(count), DEFAULT)
        self.synchronize()

    def copy_on(self, stream, to, source, count):
        """Copies between addresses of the device in the stream's order."""
        arguments = ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(count), DEFAULT
        self.call("cudaMemcpyAsync", *arguments, ctypes.c_void_p(stream.cuda_stream))

    def upload(self, tensor, array, first=0):
        """Writes the array's elements into a contiguous tensor, from its flat element ``first`` on."""
        array = np.ascontiguousarray(array)
        self.copy(tensor.data_ptr() + first * array.itemsize, array.ctypes.data, array.nbytes)

    def download(self, tensor, first, count, dtype):
        """``count`` elements of a contiguous tensor from its flat element ``first`` on."""
        array = np.empty(count, dtype)
        self.copy(array.ctypes.data, tensor.data_ptr() + first * array.itemsize, array.nbytes)
        return array

    def is_busy(self, stream):
        error = self.runtime.cudaStreamQuery(ctypes.c_void_p(stream.cuda_stream))
        assert error in (0, NOT_READY), f"CUDA error {error}"
        return error == NOT_READY


@pytest.fixture(scope="module")
def cuda():
    paddle.set_device(GPU)
    return Cuda()


@pytest.fixture(autouse=True)
def gpu_and_no_error_left_behind(cuda):
    """Each test starts on the first GPU, and leaves no error for the next call to find."""
    before = paddle.get_device()
    paddle.set_device(GPU)
    yield
    cuda.synchronize()
    assert cuda.runtime.cudaPeekAtLastError() == 0
    paddle.set_device(before)


def named(names, outputs):
    return dict(zip(names, map(array_of, outputs)))


# ---- CUDA graphs


@contextlib.contextmanager
def captured():
    from paddle.device.cuda.graphs import CUDAGraph

    graph = CUDAGraph()
    graph.capture_begin()
    try:
        yield graph
    finally:
        graph.capture_end()


@pytest.mark.parametrize("rows, width", [(300, 1408), (65537, 8), (7, 101)])
def test_swiglu_in_a_cuda_graph(cuda, rows, width):
    tensors = tensors_of(testing.swiglu_weighted_inputs(rows, width, seed=0), GPU)
    F.fused_swiglu_weighted_bwd(**tensors)
    cuda.synchronize()
    with captured() as graph:
        outputs = F.fused_swiglu_weighted_bwd(**tensors)
    for seed in (1, 2, 3):
        inputs = testing.swiglu_weighted_inputs(rows, width, seed=seed)
        for name in SWIGLU_INPUTS:
            cuda.upload(tensors[name], inputs[name])
        graph.replay()
        cuda.synchronize()
        assert_same_bits(named(SWIGLU_OUTPUTS, outputs), run_swiglu(inputs, GPU))
    graph.reset()


@pytest.mark.parametrize("passed", [False, True], ids=["new outputs", "passed outputs"])
@pytest.mark.parametrize("rows", [1, 40, 20000])
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
    for seed in (1, 2, 3):
        inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=seed)
        for name in RMSNORM_INPUTS:
            cuda.upload(tensors[name], inputs[name])
        graph.replay()
        cuda.synchronize()
        assert_same_bits(named(RMSNORM_OUTPUTS, outputs), run_rmsnorm(inputs, GPU))
    graph.reset()


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
    for seed in (1, 2, 3):
        inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=seed)
        for name in RMSNORM_INPUTS:
            cuda.upload(tensors[name], inputs[name])
        graph.replay()
        run_rmsnorm(inputs, GPU, grad_weight=expected, accumulate_grad_weight=True)
        cuda.synchronize()
        np.testing.assert_array_equal(array_of(grad_weight), array_of(expected))
    graph.reset()


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
    for seed in (1, 2, 3):
        arrays = forward.arrays(rows, seed=seed)
        for leaf, tensor in {**leaves, forward.output_grad: grad}.items():
            cuda.upload(tensor, arrays[leaf])
        graph.replay()
        cuda.synchronize()
        np.testing.assert_array_equal(array_of(output.detach()), forward.output(arrays, GPU))
        assert_same_bits(dict(zip(leaves, map(array_of, grads))), forward.gradients(arrays, GPU))
    graph.reset()


def test_results_in_the_inputs_memory_in_a_cuda_graph(cuda):
    tensors = tensors_of(testing.swiglu_weighted_inputs(300, 1408, seed=0), GPU)

    def step():
        return F.fused_swiglu_weighted_bwd_out(**tensors, do1=tensors["o1"], o2_s=tensors["do2_s"])

    step()
    cuda.synchronize()
    with captured() as graph:
        outputs = step()
    for seed in (1, 2, 3):
        inputs = testing.swiglu_weighted_inputs(300, 1408, seed=seed)
        for name in SWIGLU_INPUTS:
            cuda.upload(tensors[name], inputs[name])
        graph.replay()
        cuda.synchronize()
        assert_same_bits(named(SWIGLU_OUTPUTS, outputs), run_swiglu(inputs, GPU))
    graph.reset()


def test_train_forward_in_the_inputs_memory_in_a_cuda_graph(cuda):
    tensors = tensors_of({n: a for n, a in testing.rmsnorm_silu_gate_inputs(9000).items() if n != "grad_out"}, GPU)
    F.cake_rmsnorm_silu_gate_train_forward(**tensors, out=tensors["z"])
    cuda.synchronize()
    with captured() as graph:
        F.cake_rmsnorm_silu_gate_train_forward(**tensors, out=tensors["z"])
    for seed in (1, 2, 3):
        inputs = testing.rmsnorm_silu_gate_inputs(9000, seed=seed)
        for name, tensor in tensors.items():
            cuda.upload(tensor, inputs[name])
        graph.replay()
        cuda.synchronize()
        testing.assert_rmsnorm_silu_gate(inputs, array_of(tensors["z"]))
    graph.reset()


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


# ---- Streams


class Delay:
    """Keeps a stream busy for some 20 ms, by copying on the device."""

    def __init__(self, cuda):
        self.cuda, self.half = cuda, 1 << 30
        self.buffer = paddle.empty([2 * self.half], "uint8")

    def put_on(self, stream):
        start = self.buffer.data_ptr()
        for _ in range(40):
            self.cuda.copy_on(stream, start + self.half, start, self.half)


@pytest.fixture(scope="module")
def delay(cuda):
    return Delay(cuda)


def as_poison(array):
    return np.full_like(array, 0x7FC0 if array.dtype == np.uint16 else np.nan)


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


# ---- Tensors past 2^31 elements: equal blocks of rows, and last rows of their own

BLOCK = 1024


def filled(cuda, rows, block, last):
    """A tensor of ``rows`` rows: ``block`` over and over, and at the end the rows ``last``; made on the device."""
    width = block[0].size
    tensor = paddle.empty([rows, *block.shape[1:]], "float32" if block.dtype == np.float32 else "bfloat16")
    cuda.upload(tensor, block)
    done, whole = len(block), rows - len(last)
    while done < whole:
        count = min(done, whole - done)
        row_bytes = width * block.itemsize
        cuda.copy(tensor.data_ptr() + done * row_bytes, tensor.data_ptr(), count * row_bytes)
        done += count
    cuda.upload(tensor, last, whole * width)
    return tensor


def check_rows(cuda, tensor, rows, block, last):
    """The first, a middle and the last blocks of a result, and its last rows, against calls on those rows alone."""
    whole, width = rows - len(last), block[0].size
    for start in (0, BLOCK * (whole // BLOCK // 2), BLOCK * (whole // BLOCK - 1)):
        found = cuda.download(tensor, start * width, block.size, block.dtype)
        np.testing.assert_array_equal(found.view(np.uint8), block.reshape(-1).view(np.uint8))
    rest = whole % BLOCK
    found = cuda.download(tensor, (whole - rest) * width, rest * width, block.dtype)
    np.testing.assert_array_equal(found.view(np.uint8), block[:rest].reshape(-1).view(np.uint8))
    found = cuda.download(tensor, whole * width, last.size, block.dtype)
    np.testing.assert_array_equal(found.view(np.uint8), last.reshape(-1).view(np.uint8))


def big_swiglu(cuda, rows, width, place):
    block = testing.swiglu_weighted_inputs(BLOCK, width, seed=1)
    last = testing.swiglu_weighted_inputs(77, width, seed=2)
    tensors = {name: filled(cuda, rows, block[name], last[name]) for name in SWIGLU_INPUTS}
    outputs = F.fused_swiglu_weighted_bwd(**tensors)
    expected_block, expected_last = run_swiglu(block, place), run_swiglu(last, place)
    for name, tensor in zip(SWIGLU_OUTPUTS, outputs):
        check_rows(cuda, tensor, rows, expected_block[name], expected_last[name])


def big_rmsnorm(cuda, rows, place):
    block, last = testing.rmsnorm_silu_gate_inputs(BLOCK, seed=1), testing.rmsnorm_silu_gate_inputs(8, seed=2)
    last["weight"] = block["weight"]
    tensors = {name: filled(cuda, rows, block[name], last[name]) for name in ("grad_out", "x", "z")}
    tensors["weight"] = tensor_of(block["weight"], place)
    grad_weight = tensor_of(np.full(128, np.nan, np.float32), place)
    grad_x, grad_z, _ = F.cake_rmsnorm_silu_gate_train_backward(**tensors, grad_weight=grad_weight)
    expected_block, expected_last = run_rmsnorm(block, place), run_rmsnorm(last, place)
    for name, tensor in (("grad_x", grad_x), ("grad_z", grad_z)):
        check_rows(cuda, tensor, rows, expected_block[name], expected_last[name])

    # The sum over all rows: so many times the block's, the part of a block before the last rows, and theirs.
    whole = rows - 8
    rest = {name: array if name == "weight" else array[: whole % BLOCK] for name, array in block.items()}
    value, terms = 0.0, 0.0
    for times, inputs in ((whole // BLOCK, block), (1, rest), (1, last)):
        part = reference.cake_rmsnorm_silu_gate_train_backward(**inputs)
        value = value + times * part.grad_weight
        terms = terms + times * part.magnitudes["grad_weight"].terms
    magnitudes = part.magnitudes["grad_weight"]._replace(terms=terms)
    bound = testing.promise3_bound(value, magnitudes, "float32")
    error = testing.error_in_bounds(array_of(grad_weight), value, bound, dtype="float32")
    assert error.max() <= 1, f"{error.max()} times the bound in column {error.argmax()}"


@contextlib.contextmanager
def much_memory():
    paddle.device.cuda.empty_cache()
    try:
        yield
    finally:
        paddle.device.cuda.empty_cache()


@pytest.mark.parametrize("rows, width", [(299602, 3584), (299440, 3586)], ids=["vectors", "element by element"])
def test_swiglu_past_2_to_the_31_elements(cuda, rows, width):
    assert rows * 2 * width > 2**31
    with much_memory():
        big_swiglu(cuda, rows, width, GPU)


def test_rmsnorm_past_2_to_the_31_elements(cuda):
    rows = 16777224
    assert rows * 128 > 2**31
    with much_memory():
        big_rmsnorm(cuda, rows, GPU)


# Strides past 2^31 on a few elements: rows far apart in one buffer.

FAR = 2**31 + 24


@pytest.mark.parametrize("name", [*RMSNORM_INPUTS[:3], "grad_x", "grad_z"])
@pytest.mark.parametrize("strides", [[FAR, 1], [1, 2**25 + 8]])
def test_rmsnorm_tensor_with_strides_past_32_bits(cuda, name, strides):
    inputs = testing.rmsnorm_silu_gate_inputs(2, seed=3)
    expected = run_rmsnorm(inputs, GPU)
    tensors = tensors_of(inputs, GPU)
    array = inputs.get(name, as_poison(inputs["x"]))
    with much_memory():
        base = paddle.empty([strides[0] + 127 * strides[1] + 1], "bfloat16")
        places = [r * strides[0] + c * strides[1] for r in range(2) for c in range(128)]
        for place, value in zip(places, array.ravel()):
            cuda.upload(base, value, place)
        tensors[name] = paddle.as_strided(base, [2, 128], strides)
        outputs = F.cake_rmsnorm_silu_gate_train_backward(**tensors)
        found = np.array([cuda.download(base, place, 1, np.uint16)[0] for place in places]).reshape(2, 128)
        if name in inputs:
            np.testing.assert_array_equal(found, array)
            assert_same_bits(named(RMSNORM_OUTPUTS, outputs), expected)
        else:
            np.testing.assert_array_equal(found, expected[name])
        del base, tensors, outputs


@pytest.mark.parametrize("name", SWIGLU_INPUTS)
def test_swiglu_input_with_strides_past_32_bits(cuda, name):
    inputs = testing.swiglu_weighted_inputs(2, 8, seed=4)
    expected = run_swiglu(inputs, GPU)
    tensors = tensors_of(inputs, GPU)
    array = inputs[name]
    width = array[0].size
    with much_memory():
        base = paddle.empty([FAR + width], "float32" if name == "unzipped_probs" else "bfloat16")
        for row in range(2):
            cuda.upload(base, array[row], row * FAR)
        tensors[name] = paddle.as_strided(base, list(array.shape), [FAR, 1][: array.ndim])
        assert_same_bits(named(SWIGLU_OUTPUTS, F.fused_swiglu_weighted_bwd(**tensors)), expected)
        del base, tensors
