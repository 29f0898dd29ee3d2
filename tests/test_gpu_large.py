"""Tensors past 2^31 elements, and strides past them, on a GPU."""

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
from cuda_runtime import GPU, RMSNORM_OUTPUTS, SWIGLU_OUTPUTS, as_poison, much_memory, named
from paddle_gated_ops import testing
from paddle_gated_ops.testing import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

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
    del outputs, tensor, tensors["do2_s"]
    forward = F.fused_swiglu_weighted(**tensors)
    check_rows(cuda, forward, rows, *(swiglu_forward(inputs, place) for inputs in (block, last)))


def swiglu_forward(inputs, place):
    return array_of(F.fused_swiglu_weighted(tensor_of(inputs["o1"], place), tensor_of(inputs["unzipped_probs"], place)))


def rmsnorm_forward(inputs, place):
    return array_of(F.cake_rmsnorm_silu_gate(*(tensor_of(inputs[name], place) for name in ("x", "z", "weight"))))


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
    forward = F.cake_rmsnorm_silu_gate(tensors["x"], tensors["z"], tensors["weight"])
    check_rows(cuda, forward, rows, *(rmsnorm_forward(inputs, place) for inputs in (block, last)))

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


# o1 of exactly 2^31 elements, and past them; then do2_s (and the halves of do1), unzipped_probs; and as many rows as people
# have narrow ones of.
SWIGLU_SIZES = {
    "o1 at": (2**18, 4096),
    "o1 past, vectors": (299602, 3584),
    "o1 past, shifted": (299440, 3586),
    "do2_s at": (2**19, 4096),
    "do2_s past": (2**19 + 8, 4096),
    "probs at": (2**31, 1),
    "probs past": (2**31 + 8, 1),
    "rows": (2**26, 8),
}


@pytest.mark.parametrize("size", SWIGLU_SIZES)
def test_swiglu_past_2_to_the_31_elements(cuda, size):
    with much_memory():
        big_swiglu(cuda, *SWIGLU_SIZES[size], GPU)


@pytest.mark.parametrize("rows", [2**24, 16777224])
def test_rmsnorm_past_2_to_the_31_elements(cuda, rows):
    assert rows * 128 >= 2**31
    with much_memory():
        big_rmsnorm(cuda, rows, GPU)


# Strides past 2^31 on a few elements: rows far apart in one buffer.

FAR = 2**31 + 24


def far_view(cuda, array, strides):
    """A view of these element strides, in memory of its own, that holds the array; and a function that reads it."""
    places = [int(place) for place in places_of(array.shape, strides).ravel()]
    base = paddle.empty([max(places) + 1], "float32" if array.dtype == np.float32 else "bfloat16")
    for place, value in zip(places, array.ravel()):
        cuda.upload(base, value, place)

    def read():
        found = [cuda.download(base, place, 1, array.dtype)[0] for place in places]
        return np.array(found, array.dtype).reshape(array.shape)

    return paddle.as_strided(base, list(array.shape), strides), read


@pytest.mark.parametrize("name", [*RMSNORM_INPUTS[:3], "grad_x", "grad_z"])
@pytest.mark.parametrize("strides", [[FAR, 1], [1, 2**25 + 8]])
def test_rmsnorm_tensor_with_strides_past_32_bits(cuda, name, strides):
    inputs = testing.rmsnorm_silu_gate_inputs(2, seed=3)
    expected = run_rmsnorm(inputs, GPU)
    tensors = tensors_of(inputs, GPU)
    array = inputs.get(name, as_poison(inputs["x"]))
    with much_memory():
        tensors[name], read = far_view(cuda, array, strides)
        outputs = F.cake_rmsnorm_silu_gate_train_backward(**tensors)
        found = read()
        if name in inputs:
            np.testing.assert_array_equal(found, array)
            assert_same_bits(named(RMSNORM_OUTPUTS, outputs), expected)
        else:
            np.testing.assert_array_equal(found, expected[name])
        del read, tensors, outputs


# Rows far apart; or columns, which takes the last ones of o1 and do1 past 2^32.
@pytest.mark.parametrize("name, strides", [
    *((name, [FAR, 1]) for name in ("o1", "do2_s", "do1", "o2_s")),
    *((name, [1, 2**29 + 8]) for name in ("o1", "do2_s", "do1", "o2_s")),
    *((name, [FAR]) for name in ("unzipped_probs", "probs_grad")),
])  # fmt: skip
def test_swiglu_tensor_with_strides_past_32_bits(cuda, name, strides):
    inputs = testing.swiglu_weighted_inputs(2, 8, seed=4)
    expected = run_swiglu(inputs, GPU)
    tensors = tensors_of(inputs, GPU)
    array = inputs[name] if name in inputs else as_poison(expected[name])
    with much_memory():
        tensors[name], read = far_view(cuda, array, strides)
        outputs = dict(zip(SWIGLU_OUTPUTS, F.fused_swiglu_weighted_bwd_out(**tensors)))
        got = {output: array_of(tensor) for output, tensor in outputs.items() if output != name}
        got[name] = read()
        assert_same_bits(got, {**expected, name: expected.get(name, array)})
        del read, tensors, outputs
