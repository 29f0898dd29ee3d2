"""The sums, probs_grad over a row and grad_weight over the rows: their bounds, their order and their one rounding."""

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import MANY_ROWS, ONE_CHUNK, ONE_UNIT_CHUNKS, UNIT, array_of, exact_inputs, run_rmsnorm, run_swiglu, tensor_of
from paddle_gated_ops import testing
from paddle_gated_ops.testing import from_bf16_bits, reference, to_bf16_bits

CHUNKED = ONE_UNIT_CHUNKS
ONE = [ONE_CHUNK - 1, ONE_CHUNK, ONE_CHUNK + 1]
# Both sides of more chunks, and rows enough for whole rounds of tail chunks.
MANY = [MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + UNIT + 1, 2 * MANY_ROWS + 5]


@pytest.mark.parametrize("width", [8, 255, 3584, 2**16 + 8, 2**20])
def test_probs_grad_of_nearly_constant_terms(place, width):
    # Terms of one sign and nearly one size: each addition of a long sequence would round to the same side.
    generator = np.random.default_rng(width)
    term = np.float32(1 + 2.0**-7)
    inputs = {
        "o1": np.empty((2, 2 * width), np.uint16),
        "do2_s": to_bf16_bits(np.full((2, width), term)),
        "unzipped_probs": np.array([1.0, 0.5], np.float32),
    }
    inputs["o1"][:, :width] = to_bf16_bits(1.5)
    inputs["o1"][:, width:] = to_bf16_bits(1 + 2.0**-7 * generator.integers(0, 2, (2, width)))
    testing.assert_swiglu_weighted_bwd(inputs, run_swiglu(inputs, place))


def test_probs_grad_of_cancelling_terms(place):
    inputs = testing.swiglu_weighted_inputs(16, 2048, seed=1)
    half = {name: array[..., :1024] for name, array in {"d": inputs["do2_s"], "gate": inputs["o1"]}.items()}
    # The second half repeats the first with the other sign of up: the true sum is 0.
    inputs["do2_s"] = np.concatenate([half["d"], half["d"]], axis=1)
    up = inputs["o1"][:, 2048:3072]
    inputs["o1"] = np.concatenate([half["gate"], half["gate"], up, up ^ 0x8000], axis=1)
    outputs = run_swiglu(inputs, place)
    testing.assert_swiglu_weighted_bwd(inputs, outputs)


@pytest.mark.parametrize("rows", [1, 2, 7, *ONE, 131, 132, 133, 513, 8191, CHUNKED, CHUNKED + 1, 32767, *MANY])
def test_grad_weight_is_the_exact_multiple(place, rows):
    terms = (np.arange(128) % 19 - 9) / 4.0  # rows * terms needs 22 bits at most
    inputs = exact_inputs(rows, terms)
    outputs = run_rmsnorm(inputs, place, eps=0.0)
    np.testing.assert_array_equal(from_bf16_bits(outputs["grad_weight"]), from_bf16_bits(to_bf16_bits(rows * terms)))

    grad_weight = tensor_of(np.full(128, np.nan, np.float32), place)
    run_rmsnorm(inputs, place, eps=0.0, grad_weight=grad_weight)
    np.testing.assert_array_equal(array_of(grad_weight), rows * terms)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [UNIT - 1, UNIT, UNIT + 1, *ONE, CHUNKED - 1, CHUNKED + 1, 2 * CHUNKED + UNIT + 1, *MANY])
def test_grad_weight_of_nearly_constant_terms(place, rows, dtype):
    inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=rows)
    row = testing.rmsnorm_silu_gate_inputs(1, seed=2)
    noise = np.random.default_rng(rows).integers(0, 2, (rows, 128)).astype(np.uint16)
    inputs["grad_out"] = row["grad_out"] ^ noise
    inputs["x"], inputs["z"] = np.repeat(row["x"], rows, 0), np.repeat(row["z"], rows, 0)
    grad_weight = tensor_of(np.full(128, np.nan, np.float32), place)
    if dtype == "bfloat16":
        grad_weight = tensor_of(np.full(128, 0x7FC0, np.uint16), place)
    outputs = run_rmsnorm(inputs, place, grad_weight=grad_weight)
    testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs)


def test_grad_weight_of_four_million_rows(place):
    # 4096 blocks of the same 1024 rows, in one block's memory: the true sums are 4096 times the block's.
    blocks, rows = 4096, 1024
    row = testing.rmsnorm_silu_gate_inputs(1, seed=3)
    block = testing.rmsnorm_silu_gate_inputs(rows, seed=3)
    noise = np.random.default_rng(3).integers(0, 2, (rows, 128)).astype(np.uint16)
    block["grad_out"] = row["grad_out"] ^ noise
    block["x"], block["z"] = np.repeat(row["x"], rows, 0), np.repeat(row["z"], rows, 0)
    tensors = {name: tensor_of(array, place) for name, array in block.items()}
    for name in ("grad_out", "x", "z"):
        tensors[name] = paddle.as_strided(tensors[name], [blocks, rows, 128], [0, 128, 1])
    grad_weight = tensor_of(np.full(128, np.nan, np.float32), place)
    F.cake_rmsnorm_silu_gate_train_backward(**tensors, grad_weight=grad_weight)

    expected = reference.cake_rmsnorm_silu_gate_train_backward(**block)
    magnitudes = expected.magnitudes["grad_weight"]
    magnitudes = magnitudes._replace(terms=blocks * magnitudes.terms)
    value = blocks * expected.grad_weight
    bound = testing.promise3_bound(value, magnitudes, "float32")
    error = testing.error_in_bounds(array_of(grad_weight), value, bound, dtype="float32")
    assert error.max() <= 1, f"{error.max()} times the bound in column {error.argmax()}"


# What is there, what two far rows add, and the BF16 number nearest to the three: the smallest term breaks ties.
BF16_ROUNDINGS = [
    (1.0, 2.0**-8, 2.0**-40, 1 + 2.0**-7),
    (1.0, 2.0**-8, 0.0, 1.0),
    (1.0, 2.0**-8, -(2.0**-40), 1.0),
    (1 + 2.0**-7, 2.0**-8, 0.0, 1 + 2.0**-6),
    (1 + 2.0**-7, 2.0**-8, -(2.0**-40), 1 + 2.0**-7),
    (-1.0, -(2.0**-8), -(2.0**-40), -1 - 2.0**-7),
    (-1.0, -(2.0**-8), 2.0**-40, -1.0),
    (256.0, 1.0, 2.0**-30, 258.0),
]
FP32_ROUNDINGS = [
    (1.0, 2.0**-24, 2.0**-50, 1 + 2.0**-23),
    (1.0, 2.0**-24, 0.0, 1.0),
    (1 + 2.0**-23, 2.0**-24, -(2.0**-50), 1 + 2.0**-23),
    (1 + 2.0**-23, 2.0**-24, 0.0, 1 + 2.0**-22),
]


@pytest.mark.parametrize("dtype, cases", [("bfloat16", BF16_ROUNDINGS), ("float32", FP32_ROUNDINGS)])
def test_accumulation_rounds_once_from_fp64(place, dtype, cases):
    before, large, small, expected = np.array(cases * 128)[:128].T
    # Two rows that no GPU lane and no unit of a CPU shares: FP64 adds them.
    inputs = exact_inputs(UNIT + 2, np.zeros(128))
    for row, terms in ((0, large), (UNIT + 1, small)):
        inputs["grad_out"][row] = exact_inputs(1, terms)["grad_out"][0]
    before = to_bf16_bits(before) if dtype == "bfloat16" else before
    grad_weight = tensor_of(before, place)
    run_rmsnorm(inputs, place, eps=0.0, grad_weight=grad_weight, accumulate_grad_weight=True)
    np.testing.assert_array_equal(reference.to_float64(array_of(grad_weight)), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 16, 400, CHUNKED + 5])
def test_accumulation(place, rows, dtype):
    inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=rows)
    generator = np.random.default_rng(rows)
    before = generator.standard_normal(128).astype(np.float32) * np.float32(np.sqrt(rows))
    before = to_bf16_bits(before) if dtype == "bfloat16" else before
    grad_weight = tensor_of(before, place)
    outputs = run_rmsnorm(inputs, place, grad_weight=grad_weight, accumulate_grad_weight=True)
    testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs, initial_grad_weight=before)


def test_accumulation_of_cancelling_sums(place):
    # What is there is all but the negative of the sum: only an exact addition leaves the right rest.
    inputs = exact_inputs(300, (np.arange(128) - 64) / 64.0)
    total = 300 * (np.arange(128) - 64) / 64.0
    grad_weight = tensor_of(np.float32(2.0**-10 - total), place)
    run_rmsnorm(inputs, place, eps=0.0, grad_weight=grad_weight, accumulate_grad_weight=True)
    np.testing.assert_array_equal(array_of(grad_weight), 2.0**-10)
