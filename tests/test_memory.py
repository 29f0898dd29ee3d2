"""Memory: inputs are only written where the caller asks for it, and the caller's outputs are the tensors returned."""

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import array_of, assert_same_bits, raw, run_rmsnorm, tensor_of, tensors_of
from paddle_gated_ops import testing

ROWS = 20
OUTPUTS = ("grad_x", "grad_z", "grad_weight")


def nan_bits(*shape):
    return np.full(shape, 0x7FC0, np.uint16)


def backward(tensors, **options):
    return F.cake_rmsnorm_silu_gate_train_backward(**tensors, **options)


@pytest.fixture
def inputs():
    return testing.rmsnorm_silu_gate_inputs(ROWS, seed=1)


def test_inputs_are_unchanged(place, inputs):
    swiglu_inputs = testing.swiglu_weighted_inputs(ROWS, 40, seed=1)
    for arrays, function in ((swiglu_inputs, F.fused_swiglu_weighted_bwd), (inputs, None)):
        function = function or F.cake_rmsnorm_silu_gate_train_backward
        tensors = tensors_of(arrays, place)
        first, second = ([array_of(tensor) for tensor in function(**tensors)] for _ in range(2))
        for a, b in zip(first, second):
            np.testing.assert_array_equal(a, b)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(array_of(tensor), arrays[name])
            assert tensor.inplace_version == 0


def test_new_outputs(place, inputs):
    tensors = tensors_of(inputs, place)
    swiglu = tensors_of(testing.swiglu_weighted_inputs(ROWS, 40), place)
    for tensor in (*tensors.values(), *swiglu.values()):
        tensor.stop_gradient = False
    outputs = backward(tensors) + F.fused_swiglu_weighted_bwd(**swiglu)
    for tensor in outputs:
        assert tensor.stop_gradient and tensor.is_leaf and tensor.inplace_version == 0
        assert tensor.is_contiguous()
        assert str(tensor.place) == str(tensors["x"].place)


def test_passed_outputs_are_returned(place, inputs):
    expected = run_rmsnorm(inputs, place)
    tensors = tensors_of(inputs, place)
    outputs = {n: tensor_of(nan_bits(*a.shape), place) for n, a in expected.items()}
    for name in OUTPUTS:
        given = {name: outputs[name]}
        returned = dict(zip(OUTPUTS, backward(tensors, **given)))
        assert returned[name] is outputs[name]
        assert outputs[name].inplace_version == 1
        assert_same_bits({n: array_of(t) for n, t in returned.items()}, expected)
    returned = backward(tensors, **outputs)
    for name, tensor in zip(OUTPUTS, returned):
        assert tensor is outputs[name]
        assert tensor.inplace_version == 2 and tensor.stop_gradient
    assert_same_bits({n: array_of(t) for n, t in outputs.items()}, expected)
    assert all(tensor.inplace_version == 0 for tensor in tensors.values())


def test_workspace_and_unused_grad_weight_keep_their_version(place, inputs):
    tensors = tensors_of(inputs, place)
    grad_weight = tensor_of(nan_bits(128), place)
    backward(tensors, grad_weight=grad_weight, compute_grad_weight=False)
    assert grad_weight.inplace_version == 0


# ---- What may share memory

PAIRS = [(output, source) for output in ("grad_x", "grad_z") for source in ("grad_out", "x", "z")]


@pytest.mark.parametrize("view", ["contiguous", "step2", "transposed", "offset", "reversed"])
@pytest.mark.parametrize("output, source", PAIRS)
def test_output_in_the_place_of_an_input(place, inputs, output, source, view):
    expected = run_rmsnorm(inputs, place)
    tensors = tensors_of(inputs, place)
    tensors[source], base = testing.strided_view(inputs[source], view, place)
    returned = dict(zip(OUTPUTS, backward(tensors, **{output: tensors[source]})))
    assert returned[output] is tensors[source]
    np.testing.assert_array_equal(testing.read_view(tensors[source], base), expected[output])
    assert testing.damaged_canaries(tensors[source], base) == 0
    for name in OUTPUTS:
        if name != output:
            np.testing.assert_array_equal(array_of(returned[name]), expected[name])


@pytest.mark.parametrize("for_x", ["grad_out", "x", "z"])
@pytest.mark.parametrize("for_z", ["grad_out", "x", "z"])
def test_both_outputs_in_place(place, for_x, for_z):
    # More rows than a block or a unit: nothing may read a row that another one has overwritten.
    inputs = testing.rmsnorm_silu_gate_inputs(1000, seed=2)
    tensors = tensors_of(inputs, place)
    grad_x, grad_z = tensors[for_x], tensors[for_z]
    if for_x == for_z:
        with pytest.raises(ValueError, match="grad_x.*grad_z"):
            backward(tensors, grad_x=grad_x, grad_z=grad_z)
        np.testing.assert_array_equal(array_of(grad_x), inputs[for_x])
        return
    outputs = backward(tensors, grad_x=grad_x, grad_z=grad_z)
    assert_same_bits(dict(zip(OUTPUTS, map(array_of, outputs))), run_rmsnorm(inputs, place))


def test_the_same_memory_as_another_tensor(place, inputs):
    # The same pointer and strides, though another Tensor object.
    tensors = tensors_of(inputs, place)
    expected = run_rmsnorm(inputs, place)
    outputs = backward(tensors, grad_x=tensors["x"][:], grad_z=tensors["grad_out"][:])
    np.testing.assert_array_equal(array_of(tensors["x"]), expected["grad_x"])
    np.testing.assert_array_equal(array_of(tensors["grad_out"]), expected["grad_z"])
    assert len(outputs) == 3


def test_one_tensor_for_several_inputs(place, inputs):
    inputs["z"] = inputs["grad_out"] = inputs["x"]
    expected = run_rmsnorm(inputs, place)
    tensors = tensors_of(inputs, place)
    tensors["z"] = tensors["grad_out"] = tensors["x"]
    assert_same_bits(dict(zip(OUTPUTS, map(array_of, backward(tensors)))), expected)
    # In place of all three.
    outputs = backward(tensors, grad_x=tensors["x"])
    assert_same_bits(dict(zip(OUTPUTS, map(array_of, outputs))), expected)


def test_disjoint_parts_of_one_buffer(place, inputs):
    # All of a call's memory from one allocation, one tensor after another.
    sizes = {**{n: a.size for n, a in inputs.items()}, "grad_x": ROWS * 128, "grad_z": ROWS * 128, "grad_weight": 128}
    flat = np.concatenate([inputs.get(name, nan_bits(size)).ravel() for name, size in sizes.items()])
    buffer, begin, parts = tensor_of(flat, place), 0, {}
    for name, size in sizes.items():
        shape = [128] if "weight" in name else [ROWS, 128]
        parts[name] = paddle.as_strided(buffer, shape, [128, 1][-len(shape) :], 2 * begin)
        begin += size
    outputs = {name: parts.pop(name) for name in OUTPUTS}
    backward(parts, **outputs)
    expected = run_rmsnorm(inputs, place)
    for name, view in outputs.items():
        np.testing.assert_array_equal(testing.read_view(view, buffer), expected[name], err_msg=name)


# ---- What may not, and is refused before anything is written


def x_and_rest(place, inputs):
    """A buffer of rows of 256 columns: x is the left half of rows 1 to ROWS."""
    buffer = nan_bits(ROWS + 12, 256)
    buffer[1 : ROWS + 1, :128] = inputs["x"]
    tensors = tensors_of({n: a for n, a in inputs.items() if n != "x"}, place)
    base = tensor_of(buffer, place)
    tensors["x"] = base[1 : ROWS + 1, :128]
    return tensors, base, buffer


OVERLAPS_X = {
    "a row later": lambda base: base[2 : ROWS + 2, :128],
    "a row earlier": lambda base: base[:ROWS, :128],
    "a column later": lambda base: base[1 : ROWS + 1, 1:129],
    "the last column alone": lambda base: base[1 : ROWS + 1, 127:255],
    "every second column": lambda base: base[1 : ROWS + 1, ::2],
    "backwards": lambda base: base[1 : ROWS + 1, 127::-1],
    "a dense block over it": lambda base: paddle.as_strided(base, [ROWS, 128], [128, 1]),
    "one far corner": lambda base: paddle.as_strided(base, [ROWS, 128], [1, ROWS], (ROWS * 256 + 127) * 2),
}


@pytest.mark.parametrize("overlap", OVERLAPS_X)
@pytest.mark.parametrize("output", ["grad_x", "grad_z"])
def test_partial_overlap_with_an_input(place, inputs, output, overlap):
    tensors, base, buffer = x_and_rest(place, inputs)
    view = OVERLAPS_X[overlap](base)
    with pytest.raises(ValueError, match=rf"\b{output}\b.*\bx\b"):
        backward(tensors, **{output: view})
    np.testing.assert_array_equal(array_of(base), buffer)


BESIDE_X = {
    "right half": lambda base: base[1 : ROWS + 1, 128:],
    "right half, a row earlier": lambda base: base[:ROWS, 128:],
    "right half, backwards": lambda base: base[1 : ROWS + 1, 255:127:-1],
    "rows below": lambda base: paddle.as_strided(base, [ROWS, 128], [128, 1], (ROWS + 1) * 256 * 2),
}


@pytest.mark.parametrize("beside", BESIDE_X)
def test_no_overlap_with_an_input(place, inputs, beside):
    tensors, base, buffer = x_and_rest(place, inputs)
    grad_x = BESIDE_X[beside](base)
    backward(tensors, grad_x=grad_x)
    np.testing.assert_array_equal(array_of(base)[1 : ROWS + 1, :128], buffer[1 : ROWS + 1, :128])
    np.testing.assert_array_equal(testing.read_view(grad_x, base), run_rmsnorm(inputs, place)["grad_x"])


@pytest.mark.parametrize("strides", [[0, 1], [1, 1], [64, 1], [127, 1], [1, 0], [0, 0], [2, 4]])
@pytest.mark.parametrize("output", ["grad_x", "grad_z"])
def test_output_that_overlaps_itself(place, inputs, output, strides):
    tensors = tensors_of(inputs, place)
    before = nan_bits(128 * (ROWS + 3) * 2)
    base = tensor_of(before, place)
    view = paddle.as_strided(base, [ROWS, 128], strides)
    with pytest.raises(ValueError, match=rf"\b{output}\b"):
        backward(tensors, **{output: view})
    np.testing.assert_array_equal(array_of(base), before)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_grad_weight_that_overlaps_itself(place, inputs, dtype):
    base = tensor_of(np.full(128, 3, dtype), place)
    with pytest.raises(ValueError, match="grad_weight"):
        backward(tensors_of(inputs, place), grad_weight=paddle.as_strided(base, [128], [0]))
    np.testing.assert_array_equal(array_of(base), np.full(128, 3, dtype))


def test_outputs_that_overlap_each_other(place, inputs):
    base = tensor_of(nan_bits(ROWS + 1, 128), place)
    with pytest.raises(ValueError, match="grad_x.*grad_z|grad_z.*grad_x"):
        backward(tensors_of(inputs, place), grad_x=base[1:], grad_z=base[:ROWS])
    np.testing.assert_array_equal(array_of(base), nan_bits(ROWS + 1, 128))


@pytest.mark.parametrize("other", ["grad_out", "x", "z", "weight", "grad_x", "grad_z"])
@pytest.mark.parametrize("compute", [True, False])
def test_grad_weight_shares_nothing(place, inputs, other, compute):
    tensors = tensors_of(inputs, place)
    options = {}
    if other.startswith("grad_") and other != "grad_out":
        options[other] = tensor_of(nan_bits(ROWS, 128), place)
    shared = {**tensors, **options}[other]
    before = array_of(shared)
    grad_weight = shared if other == "weight" else shared[3]
    with pytest.raises(ValueError, match=rf"\bgrad_weight\b.*\b{other}\b"):
        backward(tensors, grad_weight=grad_weight, compute_grad_weight=compute, **options)
    np.testing.assert_array_equal(array_of(shared), before)


@pytest.mark.parametrize("other", ["grad_out", "x", "z", "weight", "grad_x", "grad_z", "grad_weight"])
@pytest.mark.parametrize("compute", [True, False])
def test_workspace_shares_nothing(place, inputs, other, compute):
    floats = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(ROWS, place) // 4
    size = 128 if "weight" in other else ROWS * 128
    # The workspace's last element is the first two of the shared tensor. A view can make BF16 of FP32, though not in
    # each Paddle the reverse, so the buffer is FP32.
    array = inputs.get(other, nan_bits(size)).reshape(-1)
    buffer = np.concatenate([np.zeros(2 * floats - 2, np.uint16), array]).view(np.float32)
    base = tensor_of(buffer, place)
    workspace = base[:floats]
    shared = paddle.view(base, "bfloat16")[2 * floats - 2 :]
    shared = shared if "weight" in other else paddle.reshape(shared, [ROWS, 128])
    tensors = tensors_of(inputs, place)
    options = {} if other in tensors else {other: shared}
    if other in tensors:
        tensors[other] = shared
    assert shared.data_ptr() == workspace.data_ptr() + 4 * floats - 4
    with pytest.raises(ValueError, match=rf"\bworkspace\b.*\b{other}\b"):
        backward(tensors, workspace=workspace, compute_grad_weight=compute, **options)
    np.testing.assert_array_equal(raw(array_of(base)), raw(buffer))


def test_grad_x_shares_nothing_with_the_weight(place, inputs):
    base = tensor_of(inputs["x"], place)
    tensors = tensors_of({**inputs, "weight": inputs["x"][5]}, place)
    tensors["weight"] = base[5]
    for name in ("grad_x", "grad_z"):
        with pytest.raises(ValueError, match=rf"\b{name}\b.*\bweight\b"):
            backward(tensors, **{name: base})
    np.testing.assert_array_equal(array_of(base), inputs["x"])


# ---- Leaves that want gradients


@pytest.mark.parametrize("name", OUTPUTS)
def test_leaf_that_wants_a_gradient(place, inputs, name):
    expected = run_rmsnorm(inputs, place)
    tensors = tensors_of(inputs, place)
    before = nan_bits(*expected[name].shape)
    leaf = tensor_of(before, place)
    leaf.stop_gradient = False
    with pytest.raises(ValueError, match=rf"\b{name}\b.*leaf"):
        backward(tensors, **{name: leaf})
    np.testing.assert_array_equal(array_of(leaf), before)
    assert leaf.inplace_version == 0

    with paddle.no_grad():
        returned = dict(zip(OUTPUTS, backward(tensors, **{name: leaf})))
    assert returned[name] is leaf and not leaf.stop_gradient
    assert leaf.inplace_version == 1
    np.testing.assert_array_equal(array_of(leaf), expected[name])


def test_views_of_a_leaf_may_be_written(place, inputs):
    leaf = tensor_of(nan_bits(ROWS + 1, 128), place)
    leaf.stop_gradient = False
    view = leaf[1:]
    assert not view.is_leaf and not view.stop_gradient
    backward(tensors_of(inputs, place), grad_x=view)
    np.testing.assert_array_equal(array_of(leaf)[1:], run_rmsnorm(inputs, place)["grad_x"])


def test_inputs_that_want_gradients(place, inputs):
    expected = run_rmsnorm(inputs, place)
    tensors = tensors_of(inputs, place)
    for tensor in tensors.values():
        tensor.stop_gradient = False
    grad_x = tensor_of(nan_bits(ROWS, 128), place)
    outputs = backward(tensors, grad_x=grad_x)
    assert all(tensor.stop_gradient for tensor in outputs)
    assert_same_bits(dict(zip(OUTPUTS, map(array_of, outputs))), expected)
    with pytest.raises(ValueError, match=r"\bgrad_x\b.*leaf"):
        backward(tensors, grad_x=tensors["x"])
    np.testing.assert_array_equal(array_of(tensors["x"]), inputs["x"])
