"""Every result is within the promised bound of float64: at all shapes, and at all magnitudes."""

import numpy as np
import pytest

from calls import ONE_UNIT_CHUNKS, assert_same_bits, run_rmsnorm, run_swiglu
from paddle_gated_ops import testing
from paddle_gated_ops.testing import from_bf16_bits, to_bf16_bits

# Both sides of: a vector of 8; a piece of 128 columns; 256, 512, 768, 1024, 1536, 2048, 2304 columns, where a row's warps or
# rounds change; and sizes of models.
WIDTHS = [*range(1, 10), 12, 66, 100, 101, 127, 128, 129, 255, 256, 257, 264, 512, 513, 520, 767, 768, 769, 776, 1016, 1024]
WIDTHS += [1025, 1032, 1280, 1408, 1536, 1537, 1544, 2040, 2047, 2048, 2049, 2056, 2304, 2305, 3584, 3586, 4096, 4104, 6152]

# Both sides of: a unit of rows, all chunks of one unit, all of two.
CHUNKED = ONE_UNIT_CHUNKS
ROWS = [1, 2, 7, 15, 16, 17, 31, 33, 63, 131, 132, 133, 513, 8191, CHUNKED - 1, CHUNKED, CHUNKED + 1, CHUNKED + 17]
ROWS += [2 * CHUNKED, 2 * CHUNKED + 1, 32767]

# BF16 magnitudes from the smallest subnormal to the largest number.
EXTREMES = [2.0**-133, 2.0**-126, 1e-30, 2.0**-64, 1e-4, 1.0, 1e4, 2.0**63, 1e30, 2.0**127]
GATES = [-3e38, -1e4, -104, -103, -89, -88, -87.5, -87, -20, -1e-3, 0, 1e-40, 1, 20, 87, 88, 89, 1e4, 2.0**25, 3e38]


def check_swiglu(inputs, place):
    outputs = run_swiglu(inputs, place)
    testing.assert_swiglu_weighted_bwd(inputs, outputs)
    return outputs


def check_rmsnorm(inputs, place, eps=1e-6, **options):
    outputs = run_rmsnorm(inputs, place, eps=eps, **options)
    testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs, eps=eps)
    return outputs


@pytest.mark.parametrize("width", WIDTHS)
def test_swiglu_widths(place, width):
    check_swiglu(testing.swiglu_weighted_inputs(5, width, seed=width), place)


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 255, 256, 257, 2570])
@pytest.mark.parametrize("width", [8, 9, 40, 264])
def test_swiglu_rows(place, rows, width):
    check_swiglu(testing.swiglu_weighted_inputs(rows, width, seed=rows), place)


@pytest.mark.parametrize("rows", [65535, 65536, 65537, 200000])
def test_swiglu_many_rows(place, rows):
    check_swiglu(testing.swiglu_weighted_inputs(rows, 8, seed=rows), place)


@pytest.mark.parametrize("rows", ROWS)
def test_rmsnorm_rows(place, rows):
    check_rmsnorm(testing.rmsnorm_silu_gate_inputs(rows, seed=rows), place)


@pytest.mark.parametrize("lead", [(), (1,), (5,), (3, 5), (2, 3, 5), (1, 2, 1, 3, 1, 2, 1, 2)])
def test_leading_shapes_give_the_same_bits(place, lead):
    rows = int(np.prod(lead))
    flat = testing.swiglu_weighted_inputs(rows, 12, seed=1)
    shaped = {name: array.reshape(lead + array.shape[1:]) for name, array in flat.items()}
    expected = run_swiglu(flat, place)
    expected = {name: array.reshape(lead + array.shape[1:]) for name, array in expected.items()}
    assert_same_bits(run_swiglu(shaped, place), expected)

    # One probability a row also as a column, whose shape the gradient has too.
    shaped["unzipped_probs"] = shaped["unzipped_probs"].reshape(lead + (1,))
    expected["probs_grad"] = expected["probs_grad"].reshape(lead + (1,))
    assert_same_bits(run_swiglu(shaped, place), expected)

    flat = testing.rmsnorm_silu_gate_inputs(rows, seed=1)
    shaped = {n: a if n == "weight" else a.reshape(lead + (128,)) for n, a in flat.items()}
    expected = run_rmsnorm(flat, place)
    expected = {n: a if n == "grad_weight" else a.reshape(lead + (128,)) for n, a in expected.items()}
    assert_same_bits(run_rmsnorm(shaped, place), expected)


def grid(*axes):
    """Every combination of the axes' values, a flat array for each axis."""
    return [array.ravel() for array in np.meshgrid(*axes, indexing="ij")]


def both_signs(values):
    return np.concatenate([values, np.negative(values)])


@pytest.mark.parametrize("width", [1, 8], ids=["element by element", "vectors"])
def test_swiglu_extreme_magnitudes(place, width):
    gate, up, d, p = grid(both_signs(GATES), both_signs([1.0, 1e30, 1e-30]), both_signs([1.0, 1e30, 1e-30]), [1.0, 0.3])
    # A row holds one combination, so that its probs_grad can be checked too.
    columns = np.ones(width)
    inputs = {
        "o1": to_bf16_bits(np.concatenate([np.outer(gate, columns), np.outer(up, columns)], axis=1)),
        "do2_s": to_bf16_bits(np.outer(d, columns)),
        "unzipped_probs": p.astype(np.float32),
    }
    outputs = check_swiglu(inputs, place)
    # Where float64 stays in range, and each factor too, nothing may be NaN at all.
    for name, array in outputs.items():
        assert not np.isnan(from_bf16_bits(array) if array.dtype == np.uint16 else array).any(), name


def test_swiglu_range_of_magnitudes(place):
    up, d, p = grid(both_signs(EXTREMES), both_signs(EXTREMES), EXTREMES[1:])
    rows = len(up)
    gate = np.tile([-100.0, -30.0, -1.0, 0.5, 3.0, 60.0, 1e5], (rows, 1))
    width = gate.shape[1]
    inputs = {
        "o1": to_bf16_bits(np.concatenate([gate, np.repeat(up[:, None], width, 1)], axis=1)),
        "do2_s": to_bf16_bits(np.repeat(d[:, None], width, 1)),
        "unzipped_probs": p.astype(np.float32),
    }
    check_swiglu(inputs, place)


@pytest.mark.parametrize("gate", [-87.5, -88, -89, -95, -103])
def test_a_product_that_overflows_although_sigmoid_is_below_the_normal_numbers(place, gate):
    """Whether sigmoid is 0 there or a number, and the product then Inf, is the device's affair: both are right."""
    up, d, p = grid(both_signs([9.126961e-08, 1e-38, 0.0]), both_signs([4.3532217e37, 3e38]), [6.5464479e37, 3e38])
    inputs = {
        "o1": to_bf16_bits(np.stack([np.full(len(up), gate), up], axis=1)),
        "do2_s": to_bf16_bits(d[:, None]),
        "unzipped_probs": p.astype(np.float32),
    }
    check_swiglu(inputs, place)


ALL_PATTERNS = np.arange(65536, dtype=np.uint32).astype(np.uint16)


@pytest.mark.parametrize("width", [1, 16], ids=["element by element", "vectors"])
@pytest.mark.parametrize("operand", ["gate", "up", "d"])
def test_swiglu_all_bf16_patterns(place, operand, width):
    rows = 65536 // width
    inputs = testing.swiglu_weighted_inputs(rows, width, seed=2)
    patterns = ALL_PATTERNS.reshape(rows, width)
    if operand == "d":
        inputs["do2_s"] = patterns
    elif operand == "gate":
        inputs["o1"][:, :width] = patterns
    else:
        inputs["o1"][:, width:] = patterns
    check_swiglu(inputs, place)


def random_patterns(generator, shape):
    """Finite BF16 patterns, each as likely as another: magnitudes over the whole range."""
    bits = generator.integers(0, 65536, shape).astype(np.uint16)
    return np.where((bits & 0x7F80) == 0x7F80, np.uint16(0x3F80), bits)


@pytest.mark.parametrize("width", [1, 3, 8])
def test_swiglu_random_patterns(place, width):
    generator = np.random.default_rng(width)
    inputs = {
        "o1": random_patterns(generator, (20000, 2 * width)),
        "do2_s": random_patterns(generator, (20000, width)),
        "unzipped_probs": from_bf16_bits(random_patterns(generator, 20000)).astype(np.float32),
    }
    check_swiglu(inputs, place)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1.0])
def test_rmsnorm_eps_and_magnitudes_of_x(place, eps):
    scales = 2.0 ** np.arange(-133, 128, 3.0)
    inputs = testing.rmsnorm_silu_gate_inputs(2 * len(scales), seed=3)
    x = from_bf16_bits(inputs["x"])
    x[::2] *= scales[:, None]  # magnitudes of a row alike
    x[1::2] = np.clip(x[1::2] * np.roll(scales, 40)[:, None] ** (np.arange(128) / 127), -3e38, 3e38)  # and mixed
    inputs["x"] = to_bf16_bits(np.clip(x, -3e38, 3e38))
    outputs = run_rmsnorm(inputs, place, eps=eps, compute_grad_weight=False)
    testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs, eps=eps, compute_grad_weight=False)


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1.0])
def test_rmsnorm_rows_of_zeros(place, eps):
    inputs = testing.rmsnorm_silu_gate_inputs(40, seed=4)
    inputs["x"][::2] = 0
    outputs = check_rmsnorm(inputs, place, eps=eps)
    assert not (outputs["grad_z"][::2] & 0x7FFF).any()
    assert np.isfinite(from_bf16_bits(outputs["grad_x"])).all()


def test_rmsnorm_rows_of_zeros_without_eps(place):
    """1 / sqrt(0) is Inf, and 0 * Inf NaN, as FP32 has it; the other rows do not see it."""
    inputs = testing.rmsnorm_silu_gate_inputs(40, seed=4)
    inputs["x"][::2] = 0
    outputs = check_rmsnorm(inputs, place, eps=0.0)
    odd = {name: array if name == "weight" else array[1::2] for name, array in inputs.items()}
    expected = run_rmsnorm(odd, place, eps=0.0)
    for name in ("grad_x", "grad_z"):
        assert np.isnan(from_bf16_bits(outputs[name][::2])).all()
        np.testing.assert_array_equal(outputs[name][1::2], expected[name])
    assert np.isnan(from_bf16_bits(outputs["grad_weight"])).all()


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("large", [1, 64, 127])
def test_rmsnorm_rows_that_mix_large_and_small(place, large, eps):
    """1e30 beside 1e-30, whose squares' sum leaves FP32's range, and 1e15 beside 1e-30, whose does not."""
    for scale in (1e30, 1e15):
        inputs = testing.rmsnorm_silu_gate_inputs(40, seed=9)
        x = from_bf16_bits(inputs["x"])
        x[:, :large] *= scale
        x[:, large:] *= 1e-30
        inputs["x"] = to_bf16_bits(x)
        outputs = check_rmsnorm(inputs, place, eps=eps)
        for name in ("grad_x", "grad_z"):
            assert not np.isnan(from_bf16_bits(outputs[name])).any(), name


def test_rmsnorm_one_column_of_a_row(place):
    # x points along one axis: all of its gradient but eps' share is projected away.
    inputs = testing.rmsnorm_silu_gate_inputs(128, seed=5)
    inputs["x"][...] = 0
    np.fill_diagonal(inputs["x"], to_bf16_bits(3.0))
    check_rmsnorm(inputs, place)
    check_rmsnorm(inputs, place, eps=0.5)


@pytest.mark.parametrize("operand", ["grad_out", "x", "z"])
def test_rmsnorm_all_bf16_patterns(place, operand):
    inputs = testing.rmsnorm_silu_gate_inputs(512, seed=6)
    inputs[operand] = ALL_PATTERNS.reshape(512, 128)
    check_rmsnorm(inputs, place)
    # Without Inf and NaN the weight's gradient is a number in each column.
    finite = np.where((ALL_PATTERNS & 0x7F80) == 0x7F80, np.uint16(0), ALL_PATTERNS)
    inputs[operand] = np.where(np.abs(from_bf16_bits(finite)) < 1e18, finite, np.uint16(0)).reshape(512, 128)
    outputs = check_rmsnorm(inputs, place)
    assert np.isfinite(from_bf16_bits(outputs["grad_weight"])).all()


def test_rmsnorm_extreme_gates(place):
    z, dy = grid(both_signs(GATES), both_signs([1.0, 1e30, 1e-30]))
    inputs = testing.rmsnorm_silu_gate_inputs(len(z), seed=7)
    inputs["z"] = np.repeat(to_bf16_bits(z)[:, None], 128, 1)
    inputs["grad_out"] = np.repeat(to_bf16_bits(dy)[:, None], 128, 1)
    check_rmsnorm(inputs, place)


def test_rmsnorm_all_patterns_of_the_weight(place):
    inputs = testing.rmsnorm_silu_gate_inputs(1, seed=8)
    for patterns in ALL_PATTERNS.reshape(512, 128):
        inputs["weight"] = patterns
        check_rmsnorm(inputs, place)


def test_rmsnorm_random_patterns(place):
    generator = np.random.default_rng(9)
    inputs = {name: random_patterns(generator, (4096, 128)) for name in ("grad_out", "x", "z")}
    inputs["weight"] = random_patterns(generator, 128)
    outputs = run_rmsnorm(inputs, place)
    testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs)


def test_rounding_is_to_nearest_even(place):
    # SiLU(256) is 256 in FP32, so that o2_s = 256 * p * up is exact before its one rounding: ties between BF16 numbers.
    ulp, half = 2.0**-7, 2.0**-8
    cases = {1 + half: 1.0, 1 + 3 * half: 1 + 2 * ulp, 1 + half + 2.0**-20: 1 + ulp, 1 + 3 * half - 2.0**-20: 1 + ulp}
    p = np.array(list(cases), dtype=np.float32)
    inputs = {
        "o1": np.tile(to_bf16_bits([256.0, 2.0**-8]), (len(p), 1)),
        "do2_s": to_bf16_bits(np.full((len(p), 1), 2.0**-8)),
        "unzipped_probs": p,
    }
    expected = to_bf16_bits(list(cases.values()))
    outputs = run_swiglu(inputs, place)
    np.testing.assert_array_equal(outputs["o2_s"][:, 0], expected)
    np.testing.assert_array_equal(outputs["do1"][:, 1], expected)


def test_sigmoid_of_every_bf16_number():
    # A row of one column with up = d = 1: probs_grad is silu(gate) in FP32: the sigmoid within 3 ulp, and roundings.
    bits = np.arange(1 << 16).astype(np.uint16)
    gate = from_bf16_bits(bits)
    bits = bits[np.abs(gate) <= 87]
    gate = from_bf16_bits(bits).astype(np.float64)
    one = to_bf16_bits(np.ones_like(gate, np.float32))
    inputs = {"o1": np.stack([bits, one], 1), "do2_s": one[:, None], "unzipped_probs": np.ones(len(bits), np.float32)}
    expected = gate / (1 + np.exp(-gate))
    error = np.abs(run_swiglu(inputs, "cpu")["probs_grad"] - expected)
    assert (error <= 2.0**-21 * np.abs(expected) + 2.0**-149).all()
