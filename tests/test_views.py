"""Views are read and written in place: strided, unaligned and broadcast tensors give the bits of contiguous ones."""

import ctypes

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import (
    RMSNORM_INPUTS,
    SWIGLU_INPUTS,
    array_of,
    assert_same_bits,
    places_of,
    run_rmsnorm,
    run_swiglu,
    tensor_of,
    tensors_of,
)
from paddle_gated_ops import testing
from paddle_gated_ops.testing import to_bf16_bits

KINDS = [kind for kind in testing.VIEW_KINDS if kind not in ("contiguous", "broadcast_row")]
SHAPES = [((6,), 7), ((9,), 8), ((5,), 264), ((3, 5), 16), ((2, 3, 4), 5)]


def rmsnorm_outputs(shape, place, kind, canary=1e30, names=("grad_x", "grad_z")):
    """Views full of NaN for the outputs, and their bases, by name."""
    pairs = {name: testing.strided_view(np.full(shape, 0x7FC0, np.uint16), kind, place, canary) for name in names}
    return {n: view for n, (view, _) in pairs.items()}, {n: base for n, (_, base) in pairs.items()}


def assert_intact(views, bases):
    for name, view in views.items():
        assert testing.damaged_canaries(view, bases[name]) == 0, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("argument", SWIGLU_INPUTS)
def test_swiglu_input(place, argument, kind):
    for lead, width in SHAPES:
        inputs = testing.swiglu_weighted_inputs(lead, width, seed=width)
        assert_same_bits(run_swiglu(inputs, place, {argument: kind}), run_swiglu(inputs, place))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("argument", RMSNORM_INPUTS)
def test_rmsnorm_input(place, argument, kind):
    for lead in ((37,), (3, 5), (2, 3, 4)):
        inputs = testing.rmsnorm_silu_gate_inputs(lead, seed=1)
        assert_same_bits(run_rmsnorm(inputs, place, {argument: kind}), run_rmsnorm(inputs, place))


@pytest.mark.parametrize("width", [*range(1, 10), 12, 66, 100, 101, 255, 1408, 3584, 3586])
def test_swiglu_unaligned(place, width):
    inputs = testing.swiglu_weighted_inputs(5, width, seed=2)
    expected = run_swiglu(inputs, place)
    testing.assert_swiglu_weighted_bwd(inputs, expected)
    for argument in SWIGLU_INPUTS:
        assert_same_bits(run_swiglu(inputs, place, {argument: "offset"}), expected)
    assert_same_bits(run_swiglu(inputs, place, dict.fromkeys(SWIGLU_INPUTS, "offset")), expected)


@pytest.mark.parametrize("seed", range(20))
def test_every_input_a_view_of_another_kind(place, seed):
    generator = np.random.default_rng(seed)
    lead = [(11,), (3, 5), (2, 3, 4)][seed % 3]
    inputs = testing.swiglu_weighted_inputs(lead, [5, 8, 130][seed % 3], seed=seed)
    views = {name: str(generator.choice(KINDS)) for name in SWIGLU_INPUTS}
    assert_same_bits(run_swiglu(inputs, place, views), run_swiglu(inputs, place))
    inputs = testing.rmsnorm_silu_gate_inputs(lead, seed=seed)
    views = {name: str(generator.choice(KINDS)) for name in RMSNORM_INPUTS}
    assert_same_bits(run_rmsnorm(inputs, place, views), run_rmsnorm(inputs, place))


def test_swiglu_broadcast_inputs(place):
    inputs = testing.swiglu_weighted_inputs((3, 5), 40, seed=3)
    inputs["do2_s"] = np.broadcast_to(inputs["do2_s"][:1, :1], (3, 5, 40))
    assert_same_bits(run_swiglu(inputs, place, {"do2_s": "broadcast_row"}), run_swiglu(inputs, place))
    inputs = testing.swiglu_weighted_inputs(9, 40, seed=3)
    inputs["o1"] = np.broadcast_to(inputs["o1"][:1], (9, 80))
    inputs["unzipped_probs"] = np.broadcast_to(inputs["unzipped_probs"][:1], 9)
    views = {"o1": "broadcast_row", "unzipped_probs": "broadcast_row"}
    assert_same_bits(run_swiglu(inputs, place, views), run_swiglu(inputs, place))


@pytest.mark.parametrize("argument", ["grad_out", "x", "z"])
def test_rmsnorm_broadcast_input(place, argument):
    inputs = testing.rmsnorm_silu_gate_inputs((7, 5), seed=4)
    inputs[argument] = np.broadcast_to(inputs[argument][:1, :1], (7, 5, 128))
    assert_same_bits(run_rmsnorm(inputs, place, {argument: "broadcast_row"}), run_rmsnorm(inputs, place))


def test_probs_from_a_column_of_a_table(place):
    inputs = testing.swiglu_weighted_inputs(33, 24, seed=5)
    expected = run_swiglu(inputs, place)
    table = np.full((33, 4), 1e30, np.float32)
    table[:, 2] = inputs["unzipped_probs"]
    tensors = tensors_of(inputs, place)
    tensors["unzipped_probs"] = tensor_of(table, place)[:, 2:3]
    outputs = F.fused_swiglu_weighted_bwd(**tensors)
    assert outputs[1].shape == [33, 1]
    np.testing.assert_array_equal(array_of(outputs[1])[:, 0], expected["probs_grad"])


def test_tail_columns_beside_other_data(place):
    # 255 columns inside a buffer full of 1e30, or of NaN: a load past the row's end would show in the sum.
    inputs = testing.swiglu_weighted_inputs(64, 255, seed=6)
    expected = run_swiglu(inputs, place)
    for canary in (1e30, np.nan):
        tensors, bases = {}, {}
        for name, array in inputs.items():
            kind = "offset" if name == "unzipped_probs" else "column_slice"
            tensors[name], bases[name] = testing.strided_view(array, kind, place, canary)
        outputs = dict(zip(("do1", "probs_grad", "o2_s"), map(array_of, F.fused_swiglu_weighted_bwd(**tensors))))
        assert_same_bits(outputs, expected)
        for name, tensor in tensors.items():
            assert testing.damaged_canaries(tensor, bases[name], canary) == 0
            np.testing.assert_array_equal(testing.read_view(tensor, bases[name]), inputs[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("argument", ["grad_x", "grad_z"])
def test_rmsnorm_output(place, argument, kind):
    for lead in ((37,), (3, 5), (2, 3, 4)):
        inputs = testing.rmsnorm_silu_gate_inputs(lead, seed=7)
        expected = run_rmsnorm(inputs, place)
        views, bases = rmsnorm_outputs(lead + (128,), place, kind, names=[argument])
        outputs = F.cake_rmsnorm_silu_gate_train_backward(**tensors_of(inputs, place), **views)
        written = dict(zip(("grad_x", "grad_z", "grad_weight"), outputs))
        assert written.pop(argument) is views[argument]
        np.testing.assert_array_equal(testing.read_view(views[argument], bases[argument]), expected[argument])
        assert_intact(views, bases)
        for name, tensor in written.items():
            np.testing.assert_array_equal(array_of(tensor), expected[name])


@pytest.mark.parametrize("seed", range(10))
def test_every_tensor_a_view_of_another_kind(place, seed):
    generator = np.random.default_rng(seed)
    inputs = testing.rmsnorm_silu_gate_inputs((3, 7), seed=seed)
    expected = run_rmsnorm(inputs, place)
    views = {name: str(generator.choice(KINDS)) for name in RMSNORM_INPUTS}
    outputs, bases = {}, {}
    for name in ("grad_x", "grad_z", "grad_weight"):
        empty = np.full(expected[name].shape, 0x7FC0, np.uint16)
        outputs[name], bases[name] = testing.strided_view(empty, str(generator.choice(KINDS)), place)
    F.cake_rmsnorm_silu_gate_train_backward(**tensors_of(inputs, place, views), **outputs)
    for name, tensor in outputs.items():
        np.testing.assert_array_equal(testing.read_view(tensor, bases[name]), expected[name], err_msg=name)
    assert_intact(outputs, bases)


def permuted(array, lead, place, generator):
    """A view of the array, the leading dimensions of whose memory lie in some order; and a function that reads it."""
    order = [*generator.permutation(lead), *range(lead, array.ndim)]
    memory = np.ascontiguousarray(array.transpose(order))
    base = tensor_of(memory, place)
    back = np.argsort(order)
    strides = [memory.strides[d] // array.itemsize for d in back]
    return paddle.as_strided(base, list(array.shape), strides), lambda: array_of(base).transpose(back)


@pytest.mark.parametrize("lead", [4, 6, 8])  # the most that Paddle's tensors have
def test_leading_dimensions_that_no_tensor_has_in_the_same_order(place, lead):
    generator = np.random.default_rng(lead)
    shape = (3,) + (2,) * (lead - 1)
    for make, call, outputs in (
        (testing.swiglu_weighted_inputs, F.fused_swiglu_weighted_bwd_out, ("do1", "probs_grad", "o2_s")),
        (testing.rmsnorm_silu_gate_inputs, F.cake_rmsnorm_silu_gate_train_backward, ("grad_x", "grad_z")),
    ):
        is_swiglu = "do1" in outputs
        inputs = make(shape, 24, seed=lead) if is_swiglu else make(shape, seed=lead)
        expected = run_swiglu(inputs, place) if is_swiglu else run_rmsnorm(inputs, place)
        tensors = {n: permuted(a, lead, place, generator)[0] for n, a in inputs.items() if n != "weight"}
        if not is_swiglu:
            tensors["weight"] = tensor_of(inputs["weight"], place)
        views = {n: permuted(np.zeros_like(expected[n]), lead, place, generator) for n in outputs}
        call(**tensors, **{n: view for n, (view, _) in views.items()})
        assert_same_bits({n: read() for n, (_, read) in views.items()}, {n: expected[n] for n in outputs})


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_grad_weight_with_a_stride(place, kind, dtype, accumulate):
    inputs = testing.rmsnorm_silu_gate_inputs(50, seed=8)
    before = np.linspace(-3, 3, 128).astype(np.float32) if accumulate else np.full(128, np.nan, np.float32)
    before = to_bf16_bits(before) if dtype == np.uint16 else before
    contiguous = tensor_of(before, place)
    run_rmsnorm(inputs, place, grad_weight=contiguous, accumulate_grad_weight=accumulate)
    view, base = testing.strided_view(before, kind, place)
    outputs = F.cake_rmsnorm_silu_gate_train_backward(
        **tensors_of(inputs, place), grad_weight=view, accumulate_grad_weight=accumulate
    )
    assert outputs[2] is view
    np.testing.assert_array_equal(testing.read_view(view, base), array_of(contiguous))
    assert testing.damaged_canaries(view, base) == 0


HALVES = {  # two outputs in one buffer [rows, 256], every element of it
    "side by side": lambda buffer: (buffer[:, :128], buffer[:, 128:]),
    "alternating columns": lambda buffer: (buffer[:, ::2], buffer[:, 1::2]),
    "alternating columns, backwards": lambda buffer: (buffer[:, 254::-2], buffer[:, 1::2]),
}


@pytest.mark.parametrize("cut", HALVES)
def test_outputs_interleaved_in_one_buffer(place, cut):
    inputs = testing.rmsnorm_silu_gate_inputs(33, seed=9)
    expected = run_rmsnorm(inputs, place)
    buffer = tensor_of(np.full((33, 256), 0x7FC0, np.uint16), place)
    grad_x, grad_z = HALVES[cut](buffer)
    F.cake_rmsnorm_silu_gate_train_backward(**tensors_of(inputs, place), grad_x=grad_x, grad_z=grad_z)
    np.testing.assert_array_equal(testing.read_view(grad_x, buffer), expected["grad_x"])
    np.testing.assert_array_equal(testing.read_view(grad_z, buffer), expected["grad_z"])


def test_outputs_interleaved_with_inputs(place):
    # A packed projection: x and z in, their gradients out into the gaps.
    inputs = testing.rmsnorm_silu_gate_inputs((5, 6), seed=10)
    expected = run_rmsnorm(inputs, place)
    packed = np.full((5, 6, 4, 128), 0x7FC0, np.uint16)
    packed[:, :, 0], packed[:, :, 2] = inputs["x"], inputs["z"]
    base = tensor_of(packed.reshape(5, 6, 512), place)
    tensors = tensors_of({name: inputs[name] for name in ("grad_out", "weight")}, place)
    x, grad_x, z, grad_z = (base[:, :, 128 * i : 128 * (i + 1)] for i in range(4))
    F.cake_rmsnorm_silu_gate_train_backward(**tensors, x=x, z=z, grad_x=grad_x, grad_z=grad_z)
    for name, view in {"x": x, "z": z}.items():
        np.testing.assert_array_equal(testing.read_view(view, base), inputs[name])
    for name, view in {"grad_x": grad_x, "grad_z": grad_z}.items():
        np.testing.assert_array_equal(testing.read_view(view, base), expected[name])


# Strides past 2^31 on a few elements, on the CPU, where memory that nobody touches costs nothing.

FAR = 2**31 + 24


def far_view(array, strides):
    """A CPU view of these element strides, in memory of its own, that holds the array; and a function that reads it."""
    offsets = places_of(array.shape, strides)
    dtype = "bfloat16" if array.dtype == np.uint16 else "float32"
    base = paddle.empty([int(offsets.max()) + 1], dtype)
    element = ctypes.c_uint16 if array.dtype == np.uint16 else ctypes.c_uint32
    address = base.data_ptr()
    for value, offset in zip(array.view(np.dtype(element)).ravel(), offsets.ravel()):
        element.from_address(address + int(offset) * array.itemsize).value = int(value)

    def read():
        found = [element.from_address(address + int(o) * array.itemsize).value for o in offsets.ravel()]
        return np.array(found, np.dtype(element)).view(array.dtype).reshape(array.shape)

    return paddle.as_strided(base, list(array.shape), strides), read


@pytest.mark.parametrize("argument, strides", [
    ("o1", [FAR, 1]),
    ("o1", [1, 2**29 + 3]),  # only the second half, up, lies past 2^31
    ("do2_s", [FAR, 1]),
    ("do2_s", [2, FAR]),
    ("unzipped_probs", [FAR]),
])
def test_swiglu_input_with_strides_past_32_bits(argument, strides):
    inputs = testing.swiglu_weighted_inputs(2, 3, seed=11)
    tensors = tensors_of(inputs, "cpu")
    tensors[argument], _ = far_view(inputs[argument], strides)
    outputs = dict(zip(("do1", "probs_grad", "o2_s"), map(array_of, F.fused_swiglu_weighted_bwd(**tensors))))
    assert_same_bits(outputs, run_swiglu(inputs, "cpu"))


@pytest.mark.parametrize("output, strides", [
    ("do1", [FAR, 1]),
    ("do1", [1, 2**29 + 3]),
    ("o2_s", [FAR, 1]),
    ("o2_s", [2, FAR]),
    ("probs_grad", [FAR]),
])
def test_swiglu_output_with_strides_past_32_bits(output, strides):
    inputs = testing.swiglu_weighted_inputs(2, 3, seed=14)
    expected = run_swiglu(inputs, "cpu")
    view, read = far_view(np.zeros_like(expected[output]), strides)
    outputs = dict(zip(expected, F.fused_swiglu_weighted_bwd_out(**tensors_of(inputs, "cpu"), **{output: view})))
    got = {name: read() if name == output else array_of(tensor) for name, tensor in outputs.items()}
    assert_same_bits(got, expected)


@pytest.mark.parametrize("strides", [[FAR, 1], [1, 2**25 + 1]])
@pytest.mark.parametrize("argument", ["grad_out", "x", "z", "grad_x", "grad_z"])
def test_rmsnorm_tensor_with_strides_past_32_bits(argument, strides):
    inputs = testing.rmsnorm_silu_gate_inputs(2, seed=12)
    expected = run_rmsnorm(inputs, "cpu")
    tensors = tensors_of(inputs, "cpu")
    array = inputs.get(argument, np.full((2, 128), 0x7FC0, np.uint16))
    tensors[argument], read = far_view(array, strides)
    outputs = dict(zip(("grad_x", "grad_z", "grad_weight"), F.cake_rmsnorm_silu_gate_train_backward(**tensors)))
    outputs = {name: read() if name == argument else array_of(tensor) for name, tensor in outputs.items()}
    assert_same_bits(outputs, expected)
    np.testing.assert_array_equal(read(), expected.get(argument, array))


def test_grad_weight_with_a_stride_past_32_bits():
    inputs = testing.rmsnorm_silu_gate_inputs(40, seed=13)
    expected = run_rmsnorm(inputs, "cpu")["grad_weight"]
    view, read = far_view(np.full(128, 0x7FC0, np.uint16), [2**25 + 1])
    F.cake_rmsnorm_silu_gate_train_backward(**tensors_of(inputs, "cpu"), grad_weight=view)
    np.testing.assert_array_equal(read(), expected)
