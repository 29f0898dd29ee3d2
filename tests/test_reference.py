"""The yardstick itself: BF16 bits, the float64 references, the error bounds, and the test inputs.

A bound is only worth something if it fails: every check here is shown a right result, that it
accepts, and wrong ones, that it refuses.
"""

import ctypes
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from paddle_gated_ops import testing
from paddle_gated_ops.testing import fp32_range, reference
from paddle_gated_ops.testing.bf16 import bf16_ulp, from_bf16_bits, to_bf16_bits

BF16_MAX = 2.0**128 - 2.0**120
ALL_BITS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
POSITIVE_FINITE = ALL_BITS[:0x7F80]


# BF16 bits


def test_all_bf16_patterns_decode_to_their_value():
    exponent, fraction = POSITIVE_FINITE >> 7 & 0xFF, POSITIVE_FINITE & 0x7F
    values = [
        math.ldexp(int(f) + (128 if e else 0), max(int(e), 1) - 134)
        for e, f in zip(exponent, fraction)
    ]
    decoded = from_bf16_bits(POSITIVE_FINITE)
    assert decoded.dtype == np.float64
    assert np.array_equal(decoded, values)
    assert np.array_equal(from_bf16_bits(POSITIVE_FINITE | 0x8000), -decoded)
    assert np.signbit(from_bf16_bits(np.uint16(0x8000)))
    assert from_bf16_bits(np.uint16(0x7F80)) == np.inf
    assert from_bf16_bits(np.uint16(0xFF80)) == -np.inf
    assert np.isnan(from_bf16_bits(ALL_BITS[0x7F81:0x8000])).all()
    assert np.isnan(from_bf16_bits(ALL_BITS[0xFF81:])).all()


def test_all_bf16_patterns_survive_a_round_trip():
    back = to_bf16_bits(from_bf16_bits(ALL_BITS))
    nan = (ALL_BITS & 0x7FFF) > 0x7F80
    assert back.dtype == np.uint16
    assert np.array_equal(back[~nan], ALL_BITS[~nan])
    assert ((back[nan] & 0x7FC0) == 0x7FC0).all()  # NaN, and a quiet one
    assert np.array_equal(back[nan] >> 15, ALL_BITS[nan] >> 15)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_between_all_neighbours_is_to_nearest_even(sign):
    lower = POSITIVE_FINITE
    low = from_bf16_bits(lower)
    high = np.append(low[1:], 2.0**128)  # past the largest number: Inf
    middle = (low + high) / 2  # exact: one bit more
    even = lower + (lower & 1)
    flag = 0x8000 if sign < 0 else 0
    assert np.array_equal(to_bf16_bits(sign * middle), even | flag)
    assert np.array_equal(to_bf16_bits(sign * np.nextafter(middle, 0)), lower | flag)
    assert np.array_equal(to_bf16_bits(sign * np.nextafter(middle, np.inf)), (lower + 1) | flag)


@pytest.mark.parametrize(
    "value, expected",
    [
        (1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-7),  # through FP32 it would be a tie, and 1
        (1 + 2.0**-8 - 2.0**-40, 1.0),
        (1 + 3 * 2.0**-8 - 2.0**-45, 1 + 2.0**-7),
        (2.0**-134, 0.0),
        (2.0**-134 + 2.0**-180, 2.0**-133),
        (5e-324, 0.0),
        (BF16_MAX + 2.0**119 - 2.0**76, BF16_MAX),
        (BF16_MAX + 2.0**119, math.inf),
        (1e300, math.inf),
        (math.inf, math.inf),
    ],
)
def test_rounding_is_one_step_from_float64(value, expected):
    assert from_bf16_bits(to_bf16_bits(value)) == expected
    assert from_bf16_bits(to_bf16_bits(-value)) == -expected


def test_bf16_conversions_keep_shapes_and_refuse_other_types():
    assert to_bf16_bits(1.0).shape == ()
    assert to_bf16_bits(np.ones((2, 0, 3))).shape == (2, 0, 3)
    assert from_bf16_bits(np.zeros((2, 0, 3), np.uint16)).shape == (2, 0, 3)
    with pytest.raises(TypeError, match="uint16"):
        from_bf16_bits(np.zeros(3, np.float32))


def test_ulp_is_the_distance_to_the_next_number():
    values = from_bf16_bits(POSITIVE_FINITE)
    assert np.array_equal(bf16_ulp(values[:-1]), np.diff(values))
    assert np.array_equal(bf16_ulp(-values), bf16_ulp(values))
    assert bf16_ulp(np.nextafter(2.0, 0)) == 2.0**-7
    assert bf16_ulp(1e-300) == 2.0**-133
    assert bf16_ulp(BF16_MAX) == bf16_ulp(1e300) == 2.0**120
    assert np.isnan(bf16_ulp(np.nan))


# The references


def test_sigmoid_is_accurate_at_every_gate():
    gates = [-3e38, -1e4, -740.0, -708.0, -104.0, -87.5, -20.0, -1.0, -1e-30, 0.0, 0.5, 17.0, 40.0]
    gates += [88.0, 1e4, 3e38]
    found = reference.sigmoid(np.array(gates))
    with localcontext() as context:
        context.prec = 60
        for gate, value in zip(gates, found):
            exact = 1 / (1 + (-Decimal(gate)).exp()) if gate > -1e4 else Decimal(0)
            error = abs(Decimal(float(value)) - exact)
            assert error <= exact * Decimal(2) ** -51 + Decimal(2) ** -1074, gate


def derivative(function, array):
    """Central differences with one Richardson step of sum(function(array)) by each element."""
    gradient = np.empty(array.shape)
    for index in np.ndindex(array.shape):
        difference = []
        for step in (2e-3, 1e-3):
            ends = []
            for sign in (1.0, -1.0):
                moved = array.copy()
                moved[index] += sign * step
                ends.append(function(moved))
            difference.append((ends[0] - ends[1]).sum() / (2 * step))
        gradient[index] = (4 * difference[1] - difference[0]) / 3
    return gradient


@pytest.mark.parametrize("probs_shape", [(2, 3), (2, 3, 1)])
def test_swiglu_backward_is_the_derivative_of_its_forward(probs_shape):
    generator = np.random.default_rng(1)
    o1 = 2 * generator.standard_normal((2, 3, 10))
    d = generator.standard_normal((2, 3, 5))
    probs = generator.uniform(0.1, 1.0, probs_shape)
    result = reference.fused_swiglu_weighted_bwd(o1, d, probs)

    by_o1 = derivative(lambda a: d * reference.swiglu_weighted(a, probs), o1)
    by_probs = derivative(lambda a: d * reference.swiglu_weighted(o1, a), probs)
    np.testing.assert_allclose(result.do1, by_o1, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(result.probs_grad, by_probs, rtol=1e-9, atol=1e-10)
    gate, up = o1[..., :5], o1[..., 5:]
    forward = gate / (1 + np.exp(-gate)) * up * probs.reshape(2, 3, 1)
    np.testing.assert_allclose(result.o2_s, forward, rtol=1e-14)


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_rmsnorm_backward_is_the_derivative_of_its_forward(eps):
    generator = np.random.default_rng(2)
    dy, x, z = generator.standard_normal((3, 2, 128))
    weight = generator.standard_normal(128)
    result = reference.cake_rmsnorm_silu_gate_train_backward(dy, x, z, weight, eps)

    def forward(x=x, z=z, weight=weight):
        return dy * reference.rmsnorm_silu_gate(x, z, weight, eps)

    close = {"rtol": 1e-9, "atol": 1e-10}
    np.testing.assert_allclose(result.grad_x, derivative(lambda a: forward(x=a), x), **close)
    np.testing.assert_allclose(result.grad_z, derivative(lambda a: forward(z=a), z), **close)
    by_weight = derivative(lambda a: forward(weight=a), weight)
    np.testing.assert_allclose(result.grad_weight, by_weight, **close)
    rms = np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float64(np.float32(eps)))
    plain = x / rms * weight * z / (1 + np.exp(-z))
    np.testing.assert_allclose(reference.rmsnorm_silu_gate(x, z, weight, eps), plain, rtol=1e-13)


def test_eps_is_rounded_to_fp32():
    x = np.full((1, 128), 1e-3)
    for function in (reference.rmsnorm_silu_gate, lambda *a: rmsnorm_reference(*a).grad_z):
        arguments = (x, np.ones((1, 128)), np.ones(128))
        rounded = float(np.float32(1e-6))
        assert np.array_equal(function(*arguments, 1e-6), function(*arguments, rounded))
        assert not np.array_equal(function(*arguments, 1e-6), function(*arguments, 1.0001e-6))


def rmsnorm_reference(x, z, weight, eps):
    return reference.cake_rmsnorm_silu_gate_train_backward(np.ones_like(x), x, z, weight, eps)


def test_rows_do_not_depend_on_the_blocks():
    inputs = testing.swiglu_weighted_inputs(70_000, 1)  # more than one block
    whole = reference.fused_swiglu_weighted_bwd(**inputs)
    tail = {name: array[-3:] for name, array in inputs.items()}
    alone = reference.fused_swiglu_weighted_bwd(**tail)
    assert np.array_equal(whole.do1[-3:], alone.do1)
    assert np.array_equal(whole.probs_grad[-3:], alone.probs_grad)
    assert np.array_equal(whole.o2_s[-3:], alone.o2_s)
    for name, parts in alone.magnitudes.items():
        for all_rows, rows in zip(whole.magnitudes[name], parts):
            assert np.array_equal(all_rows[-3:], rows)

    inputs = testing.rmsnorm_silu_gate_inputs((3, 201))
    whole = reference.cake_rmsnorm_silu_gate_train_backward(**inputs)
    last = {name: array[2, 200] if array.ndim > 1 else array for name, array in inputs.items()}
    alone = reference.cake_rmsnorm_silu_gate_train_backward(**last)
    assert np.array_equal(whole.grad_x[2, 200], alone.grad_x)
    assert np.array_equal(whole.grad_z[2, 200], alone.grad_z)
    assert alone.grad_weight.shape == (128,)


def test_weight_gradient_sums_every_row_once():
    inputs = testing.rmsnorm_silu_gate_inputs(603)  # several blocks, an odd rest
    result = reference.cake_rmsnorm_silu_gate_train_backward(**inputs)
    one_by_one = [
        reference.cake_rmsnorm_silu_gate_train_backward(
            *(inputs[name][row] for name in ("grad_out", "x", "z")), inputs["weight"]
        )
        for row in range(603)
    ]
    exact = [math.fsum(column) for column in zip(*(r.grad_weight for r in one_by_one))]
    sizes = np.sum([np.abs(r.grad_weight) for r in one_by_one], axis=0)
    assert (np.abs(result.grad_weight - exact) <= 2.0**-48 * sizes).all()
    assert (result.magnitudes["grad_weight"].terms >= sizes).all()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 1, 3)])
@pytest.mark.parametrize("half", [0, 1, 6])
def test_references_take_any_leading_shape(shape, half):
    inputs = testing.swiglu_weighted_inputs(shape, half)
    result = reference.fused_swiglu_weighted_bwd(**inputs)
    assert result.do1.shape == shape + (2 * half,)
    assert result.o2_s.shape == shape + (half,)
    assert result.probs_grad.shape == shape
    if half == 0:
        assert (result.probs_grad == 0).all()
    inputs["unzipped_probs"] = inputs["unzipped_probs"][..., None]
    column = reference.fused_swiglu_weighted_bwd(**inputs)
    assert np.array_equal(column.probs_grad, result.probs_grad[..., None])

    inputs = testing.rmsnorm_silu_gate_inputs(shape)
    result = reference.cake_rmsnorm_silu_gate_train_backward(**inputs)
    assert result.grad_x.shape == result.grad_z.shape == shape + (128,)
    assert result.grad_weight.shape == (128,)
    assert (result.grad_weight == 0).all() == (math.prod(shape) == 0)


def test_references_refuse_shapes_that_do_not_fit():
    swiglu = testing.swiglu_weighted_inputs((4, 2), 3)
    rmsnorm = testing.rmsnorm_silu_gate_inputs(4)
    wrong = [
        (reference.fused_swiglu_weighted_bwd, swiglu, "o1", (4, 2, 7)),
        (reference.fused_swiglu_weighted_bwd, swiglu, "do2_s", (3, 2, 3)),
        (reference.fused_swiglu_weighted_bwd, swiglu, "unzipped_probs", (4,)),
        (reference.cake_rmsnorm_silu_gate_train_backward, rmsnorm, "x", (4, 127)),
        (reference.cake_rmsnorm_silu_gate_train_backward, rmsnorm, "z", (1, 128)),
        (reference.cake_rmsnorm_silu_gate_train_backward, rmsnorm, "grad_out", (128,)),
        (reference.cake_rmsnorm_silu_gate_train_backward, rmsnorm, "weight", (1, 128)),
    ]
    for function, inputs, name, shape in wrong:
        with pytest.raises(ValueError, match="expected"):
            function(**{**inputs, name: np.zeros(shape)})


def test_nan_and_inf_are_where_the_formulas_have_them():
    o1, d, probs = np.ones((4, 6)), np.ones((4, 3)), np.ones(4)
    o1[0, 0] = np.inf  # 1 - s = 0: Inf * 0
    o1[1, 4] = np.nan
    d[2, 1], probs[2] = np.inf, 0.0
    result = reference.fused_swiglu_weighted_bwd(o1, d, probs)
    assert np.array_equal(np.isnan(result.do1[0]), [1, 0, 0, 0, 0, 0])
    assert result.do1[0, 3] == result.o2_s[0, 0] == result.probs_grad[0] == np.inf
    assert np.array_equal(np.isnan(result.do1[1]), [0, 1, 0, 0, 0, 0])
    assert np.array_equal(np.isnan(result.o2_s[1]), [0, 1, 0])
    assert np.isnan(result.probs_grad[1])
    assert np.array_equal(np.isnan(result.do1[2]), [0, 1, 0, 0, 1, 0])
    assert (result.o2_s[2] == 0).all() and result.probs_grad[2] == np.inf
    assert np.isfinite(result.do1[3]).all() and np.isfinite(result.probs_grad[3])

    x = np.ones((3, 128))
    x[0, 5] = np.inf
    x[1] = 2.0**64  # squares past FP32's range: rstd is 0
    result = rmsnorm_reference(x, np.ones_like(x), np.ones(128), 1e-6)
    assert np.isnan(result.grad_x[0]).all()
    assert np.array_equal(np.flatnonzero(np.isnan(result.grad_z[0])), [5])
    assert (result.grad_x[1] == 0).all() and (result.grad_z[1] == 0).all()
    assert np.array_equal(np.flatnonzero(np.isnan(result.grad_weight)), [5])
    assert (result.grad_z[2] != 0).all()


# The bounds. Two plain FP32 implementations stand for the library: right by construction of the
# arithmetic that the bounds allow for, and a base to build wrong results on.


def to_float32(bits):
    return from_bf16_bits(bits).astype(np.float32)


def stable_sigmoid(gate):
    return 1 / (1 + np.exp(-gate))


def swiglu_in_fp32(inputs, derivative=lambda g, s: s * (1 + g * (1 - s)), sigmoid=stable_sigmoid):
    o1, d, probs = to_float32(inputs["o1"]), to_float32(inputs["do2_s"]), inputs["unzipped_probs"]
    gate, up = np.split(o1, 2, axis=-1)
    p = probs.reshape(o1.shape[:-1] + (1,))
    with np.errstate(all="ignore"):
        s = sigmoid(gate)
        silu = s * gate
        gate_grad = ((derivative(gate, s) * p) * d) * up
        do1 = np.concatenate([gate_grad, (silu * p) * d], axis=-1)
        probs_grad = ((silu * d) * up).sum(axis=-1, dtype=np.float32)
        return {
            "do1": to_bf16_bits(do1),
            "probs_grad": np.asarray(probs_grad).reshape(probs.shape),
            "o2_s": to_bf16_bits((silu * p) * up),
        }


def rmsnorm_in_fp32(inputs, eps=1e-6, initial=None, dtype="bfloat16"):
    dy, x, z, w = (to_float32(inputs[name]) for name in ("grad_out", "x", "z", "weight"))
    with np.errstate(all="ignore"):
        s = stable_sigmoid(z)
        mean = (x * x).mean(axis=-1, keepdims=True, dtype=np.float32)
        rstd = 1 / np.sqrt(mean + np.float32(eps))
        n = x * rstd
        a = (s * z) * dy
        aw = a * w
        grad_x = rstd * (aw - n * (aw * n).mean(axis=-1, keepdims=True, dtype=np.float32))
        grad_z = ((s * (1 + z * (1 - s)) * dy) * n) * w
        dw = (a * n).reshape(-1, 128).sum(axis=0, dtype=np.float64)
        if initial is not None:
            dw = dw + reference.to_float64(initial)
        return {
            "grad_x": to_bf16_bits(grad_x),
            "grad_z": to_bf16_bits(grad_z),
            "grad_weight": to_bf16_bits(dw) if dtype == "bfloat16" else dw.astype(np.float32),
        }


def test_plain_fp32_is_within_the_bounds():
    inputs = testing.swiglu_weighted_inputs((50, 3), 100)
    errors = testing.check_swiglu_weighted_bwd(inputs, swiglu_in_fp32(inputs))
    assert set(errors) == {"do1", "probs_grad", "o2_s"}
    # Half an ulp is the rounding at the store; 0 would mean that nothing was compared.
    assert 0.4 < errors["do1"] < 0.51 and 0.4 < errors["o2_s"] < 0.51
    assert 0 < errors["probs_grad"] < 1

    inputs = testing.rmsnorm_silu_gate_inputs((50, 3))
    for dtype, most in (("bfloat16", 1.0), ("float32", 0.1)):
        outputs = rmsnorm_in_fp32(inputs, dtype=dtype)
        errors = testing.check_rmsnorm_silu_gate_bwd(inputs, outputs)
        assert set(errors) == {"grad_x", "grad_z", "grad_weight"}
        assert 0.4 < errors["grad_x"] < 0.51 and 0.4 < errors["grad_z"] < 0.51
        assert 0 < errors["grad_weight"] < most


def wild(generator, shape):
    """Numbers of every magnitude that BF16 has, special ones now and then."""
    kind = generator.integers(5)
    values = generator.standard_normal(shape)
    if kind == 1:
        values = values * np.exp2(generator.uniform(-133, 127, shape))
    elif kind == 2:
        values = values * np.exp2(generator.uniform(-133, 127))
    elif kind == 3:
        values = generator.uniform(-110, 110, shape)
    elif kind == 4:
        special = [0.0, -0.0, 1.0, -1.0, 1e30, -1e30, 3e38, -3e38, 1e-38, -1e-40, 87.0, -103.0]
        values = generator.choice(special, shape)
    odd = generator.random(shape) < generator.choice([0.0, 0.01])
    return to_bf16_bits(np.where(odd, generator.choice([np.inf, -np.inf, np.nan], shape), values))


@pytest.mark.parametrize("seed", range(300))
def test_plain_fp32_is_within_the_bounds_whatever_the_magnitudes(seed):
    generator = np.random.default_rng(seed)
    rows, half = generator.integers(1, 9), generator.integers(1, 40)
    inputs = {
        "o1": np.concatenate([wild(generator, (rows, half)) for _ in range(2)], axis=-1),
        "do2_s": wild(generator, (rows, half)),
        "unzipped_probs": to_float32(wild(generator, (rows,))),
    }
    testing.assert_swiglu_weighted_bwd(inputs, swiglu_in_fp32(inputs))

    inputs = {name: wild(generator, (rows, 128)) for name in ("grad_out", "x", "z")}
    inputs["weight"] = wild(generator, (128,))
    eps = generator.choice([0.0, 1e-30, 1e-6, 1.0])
    dtype = generator.choice(["bfloat16", "float32"])
    outputs = rmsnorm_in_fp32(inputs, eps, dtype=dtype)
    testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs, eps)


GATES = [-3e38, -1e4, -104.0, -103.0, -89.0, -88.0, -87.5, -87.0, -1.28125, 0.0]
GATES += [20.0, 88.0, 1e4, 3e38]


def extreme_swiglu_inputs(size=1.0):
    """Every gate with up and grad of both signs; up and grad of magnitude ``size``."""
    signs = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]]) * size
    gate = np.broadcast_to(GATES, (4, len(GATES)))
    up = np.broadcast_to(signs[:, :1], gate.shape)
    return {
        "o1": to_bf16_bits(np.concatenate([gate, up], axis=-1)),
        "do2_s": to_bf16_bits(np.broadcast_to(signs[:, 1:], gate.shape)),
        "unzipped_probs": np.full(4, 0.75, np.float32),
    }


@pytest.mark.parametrize("size", [1.0, 1e30])
def test_extreme_gates_are_within_the_bounds(size):
    inputs = extreme_swiglu_inputs(size)
    testing.assert_swiglu_weighted_bwd(inputs, swiglu_in_fp32(inputs))
    flushed = swiglu_in_fp32(
        inputs,
        sigmoid=lambda g: np.where(stable_sigmoid(g) < 2.0**-126, np.float32(0), stable_sigmoid(g)),
    )
    testing.assert_swiglu_weighted_bwd(inputs, flushed)


def test_a_derivative_that_vanishes_at_large_gates_is_refused():
    inputs = extreme_swiglu_inputs()
    wrong = swiglu_in_fp32(inputs, derivative=lambda g, s: s * (1 + g - g * s))
    errors = testing.check_swiglu_weighted_bwd(inputs, wrong)
    assert errors["do1"] > 10
    assert errors["o2_s"] <= 1 and errors["probs_grad"] <= 1


def test_a_nan_from_finite_inputs_is_refused():
    inputs = extreme_swiglu_inputs(1e30)
    wrong = swiglu_in_fp32(inputs)
    gate, up = np.split(to_float32(inputs["o1"]), 2, axis=-1)
    with np.errstate(all="ignore"):
        late = (up * to_float32(inputs["do2_s"])) * stable_sigmoid(gate)  # Inf * 0
    wrong["do1"][:, : len(GATES)] = np.where(np.isnan(late), 0x7FC0, wrong["do1"][:, : len(GATES)])
    assert testing.check_swiglu_weighted_bwd(inputs, wrong)["do1"] == np.inf

    inputs = testing.rmsnorm_silu_gate_inputs(2)
    inputs["x"][...], inputs["z"][...] = to_bf16_bits(1.0), to_bf16_bits(1.0)
    inputs["x"][0, 3], inputs["z"][0, 3] = to_bf16_bits(4.0), to_bf16_bits(-103.0)
    inputs["weight"][3] = to_bf16_bits(3e38)  # n * w is past FP32's range, (u * n) * w is not
    right = rmsnorm_in_fp32(inputs)
    assert testing.check_rmsnorm_silu_gate_bwd(inputs, right)["grad_z"] <= 1
    right["grad_z"][0, 3] = 0x7FC0
    assert testing.check_rmsnorm_silu_gate_bwd(inputs, right)["grad_z"] == np.inf


def one_ulp_further(outputs, name, expected):
    """The right BF16 result, moved away from the exact value until it errs by 1 to 2 ulps."""
    right = from_bf16_bits(outputs[name])
    away = np.where(right >= expected, 1.0, -1.0)
    outputs[name] = to_bf16_bits(right + away * bf16_ulp(expected) * (1 + 2.0**-7))


def swap_columns(outputs, name, _):
    outputs[name][..., [0, 1]] = outputs[name][..., [1, 0]]


def swap_rows(outputs, name, _):
    outputs[name][[0, 1]] = outputs[name][[1, 0]]


def leave_last_unwritten(outputs, name, _):
    outputs[name].reshape(-1)[-1] = np.nan if outputs[name].dtype == np.float32 else 0xFFFF


def leave_last_zero(outputs, name, _):
    outputs[name].reshape(-1)[-1] = 0


def make_one_inf(outputs, name, _):
    outputs[name].reshape(-1)[2] = np.inf if outputs[name].dtype == np.float32 else 0x7F80


def flip_a_sign(outputs, name, _):
    outputs[name].reshape(-1)[3] *= -1 if outputs[name].dtype == np.float32 else 1
    if outputs[name].dtype == np.uint16:
        outputs[name].reshape(-1)[3] ^= 0x8000


def err_by_2_to_minus_18(outputs, name, expected):
    outputs[name] = (outputs[name] * (1 + 2.0**-18) + np.sign(expected) * 1e-4).astype(np.float32)


ELEMENTWISE = [one_ulp_further, swap_columns, swap_rows, leave_last_unwritten, leave_last_zero]
ELEMENTWISE += [make_one_inf, flip_a_sign]
SUM = [err_by_2_to_minus_18, leave_last_unwritten, leave_last_zero, make_one_inf, flip_a_sign]


@pytest.mark.parametrize(
    "name, damage",
    [(name, damage) for name in ("do1", "o2_s") for damage in ELEMENTWISE]
    + [("probs_grad", damage) for damage in SUM + [swap_rows]],
)
def test_wrong_swiglu_outputs_are_refused(name, damage):
    inputs = testing.swiglu_weighted_inputs(5, 12)
    outputs = swiglu_in_fp32(inputs)
    damage(outputs, name, getattr(reference.fused_swiglu_weighted_bwd(**inputs), name))
    errors = testing.check_swiglu_weighted_bwd(inputs, outputs)
    assert errors.pop(name) > 1
    assert max(errors.values()) <= 1
    with pytest.raises(AssertionError, match=name):
        testing.assert_swiglu_weighted_bwd(inputs, outputs)


@pytest.mark.parametrize(
    "name, dtype, damage",
    [(name, "bfloat16", damage) for name in ("grad_x", "grad_z") for damage in ELEMENTWISE]
    + [("grad_weight", "float32", damage) for damage in SUM + [swap_columns]]
    + [("grad_weight", "bfloat16", damage) for damage in ELEMENTWISE if damage is not swap_rows],
)
def test_wrong_rmsnorm_outputs_are_refused(name, dtype, damage):
    inputs = testing.rmsnorm_silu_gate_inputs(5)
    outputs = rmsnorm_in_fp32(inputs, dtype=dtype)
    result = reference.cake_rmsnorm_silu_gate_train_backward(**inputs)
    damage(outputs, name, getattr(result, name))
    errors = testing.check_rmsnorm_silu_gate_bwd(inputs, outputs)
    assert errors.pop(name) > 1
    assert max(errors.values()) <= 1
    with pytest.raises(AssertionError, match=name):
        testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs)


# The forwards, and the clamped form

CLAMPED = 0.75


def swiglu_forward_in_fp32(inputs, clamp_value=None):
    clamp = np.inf if clamp_value is None else np.float32(clamp_value)
    gate, up = np.split(to_float32(inputs["o1"]), 2, axis=-1)
    gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
    probs = inputs["unzipped_probs"].reshape(gate.shape[:-1] + (1,))
    with np.errstate(all="ignore"):
        return to_bf16_bits(((stable_sigmoid(gate) * gate) * probs) * up)


def rmsnorm_forward_in_fp32(inputs, eps=1e-6):
    x, z, weight = (to_float32(inputs[name]) for name in ("x", "z", "weight"))
    with np.errstate(all="ignore"):
        mean = (x * x).mean(axis=-1, keepdims=True, dtype=np.float32)
        n = x * (1 / np.sqrt(mean + np.float32(eps)))
        return to_bf16_bits(((stable_sigmoid(z) * z) * n) * weight)


def clamped_bwd_in_fp32(inputs, clamp_value):
    """The unclamped backward of clamped halves, with nothing beyond; clamp_value is a BF16 number."""
    o1 = to_float32(inputs["o1"])
    gate, up = np.split(o1, 2, axis=-1)
    moved = np.concatenate([np.minimum(gate, clamp_value), np.clip(up, -clamp_value, clamp_value)], -1)
    outputs = swiglu_in_fp32({**inputs, "o1": to_bf16_bits(moved)})
    outputs["do1"] = np.where((moved == o1) | np.isnan(o1), outputs["do1"], np.uint16(0))
    return outputs


@pytest.mark.parametrize("clamp_value", [0.1, 0.5, 0.75, 2.0])
def test_the_clamped_backward_is_the_derivative_of_its_forward(clamp_value):
    generator = np.random.default_rng(5)
    o1 = 2 * generator.standard_normal((2, 3, 40))
    o1[np.abs(np.abs(o1) - clamp_value) < 0.01] = 0.02  # no differences across an edge
    d, probs = generator.standard_normal((2, 3, 20)), generator.uniform(0.1, 1.0, (2, 3))
    result = reference.fused_swiglu_weighted_bwd(o1, d, probs, clamp_value)
    by_o1 = derivative(lambda a: d * reference.swiglu_weighted(a, probs, clamp_value), o1)
    by_probs = derivative(lambda a: d * reference.swiglu_weighted(o1, a, clamp_value), probs)
    np.testing.assert_allclose(result.do1, by_o1, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(result.probs_grad, by_probs, rtol=1e-9, atol=1e-10)
    forward = reference.swiglu_weighted(o1, probs, clamp_value)
    np.testing.assert_array_equal(result.o2_s, forward)
    gate, up = np.split(o1, 2, axis=-1)
    beyond = np.concatenate([gate > clamp_value, np.abs(up) > clamp_value], -1)
    assert beyond.any() and np.array_equal(result.do1 == 0, beyond)


def test_at_the_clamp_the_gradient_passes_and_nan_is_not_clamped():
    o1 = np.array([[1.0, 1.5, np.nan, -5.0, -1.0, -1.5, np.nan, 1.0]])  # gates, then ups
    result = reference.fused_swiglu_weighted_bwd(o1, np.ones((1, 4)), np.ones(1), 1.0)
    finite = reference.fused_swiglu_weighted_bwd(
        np.array([[1.0, 1.0, 0.0, -5.0, -1.0, -1.0, 0.0, 1.0]]), np.ones((1, 4)), np.ones(1)
    )
    expected = np.array([True, False, False, True, True, False, False, True])
    np.testing.assert_array_equal(result.do1[0, expected], finite.do1[0, expected])
    assert (result.do1[0, [1, 5]] == 0).all() and np.isnan(result.do1[0, [2, 6]]).all()
    assert np.isnan(result.o2_s).tolist() == [[False, False, True, False]]


def test_the_clamp_is_rounded_to_fp32():
    o1, d, probs = np.full((1, 2), 2.0), np.ones((1, 1)), np.ones(1)
    assert (reference.fused_swiglu_weighted_bwd(o1, d, probs, 2 - 2.0**-40).do1 != 0).all()
    assert (reference.fused_swiglu_weighted_bwd(o1, d, probs, 2 - 2.0**-20).do1 == 0).all()


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,), (400, 3)])
def test_forwards_with_magnitudes_are_the_plain_forwards(shape):
    inputs = testing.swiglu_weighted_inputs(shape, 130)
    for clamp_value in (None, CLAMPED):
        arguments = inputs["o1"], inputs["unzipped_probs"], clamp_value
        found = reference.fused_swiglu_weighted(*arguments)
        np.testing.assert_array_equal(found.value, reference.swiglu_weighted(*arguments))
        assert all(part.shape == found.value.shape for part in found.magnitudes)
    inputs = testing.rmsnorm_silu_gate_inputs(shape)
    arguments = inputs["x"], inputs["z"], inputs["weight"], 1e-3
    found = reference.cake_rmsnorm_silu_gate(*arguments)
    np.testing.assert_array_equal(found.value, reference.rmsnorm_silu_gate(*arguments))
    assert all(part.shape == found.value.shape for part in found.magnitudes)


def test_plain_fp32_forwards_are_within_the_bounds():
    inputs = testing.swiglu_weighted_inputs((50, 3), 100)
    for clamp_value in (None, CLAMPED):
        output = swiglu_forward_in_fp32(inputs, clamp_value)
        assert 0.4 < testing.check_swiglu_weighted(inputs, output, clamp_value)["o2_s"] < 0.51
    errors = testing.check_swiglu_weighted_bwd(inputs, clamped_bwd_in_fp32(inputs, CLAMPED), CLAMPED)
    assert 0.4 < errors["do1"] < 0.51 and 0.4 < errors["o2_s"] < 0.51 and 0 < errors["probs_grad"] < 1
    inputs = testing.rmsnorm_silu_gate_inputs((50, 3))
    errors = testing.check_rmsnorm_silu_gate(inputs, rmsnorm_forward_in_fp32(inputs))
    assert 0.4 < errors["y"] < 0.51


@pytest.mark.parametrize("seed", range(60))
def test_plain_fp32_forwards_are_within_the_bounds_whatever_the_magnitudes(seed):
    generator = np.random.default_rng(seed)
    inputs = {"o1": wild(generator, (200, 80)), "unzipped_probs": generator.uniform(0, 1, 200).astype(np.float32)}
    for clamp_value in (None, 2.0**-10, 1.0, 2.0**66):
        output = swiglu_forward_in_fp32(inputs, clamp_value)
        assert testing.check_swiglu_weighted(inputs, output, clamp_value)["o2_s"] <= 1
        whole = {**inputs, "do2_s": wild(generator, (200, 40))}
        if clamp_value is not None:
            errors = testing.check_swiglu_weighted_bwd(whole, clamped_bwd_in_fp32(whole, clamp_value), clamp_value)
            assert max(errors.values()) <= 1, (clamp_value, errors)
    inputs = {"x": wild(generator, (50, 128)), "z": wild(generator, (50, 128)), "weight": wild(generator, (128,))}
    assert testing.check_rmsnorm_silu_gate(inputs, rmsnorm_forward_in_fp32(inputs))["y"] <= 1


@pytest.mark.parametrize("damage", ELEMENTWISE)
def test_wrong_forwards_are_refused(damage):
    inputs = testing.swiglu_weighted_inputs(5, 12)
    for clamp_value in (None, CLAMPED):
        outputs = {"o2_s": swiglu_forward_in_fp32(inputs, clamp_value)}
        arguments = inputs["o1"], inputs["unzipped_probs"], clamp_value
        damage(outputs, "o2_s", reference.swiglu_weighted(*arguments))
        assert testing.check_swiglu_weighted(inputs, outputs["o2_s"], clamp_value)["o2_s"] > 1
        with pytest.raises(AssertionError, match=r"o2_s\[\d+, \d+\].*gate=.*up=.*prob="):
            testing.assert_swiglu_weighted(inputs, outputs["o2_s"], clamp_value)
    inputs = testing.rmsnorm_silu_gate_inputs(5)
    outputs = {"y": rmsnorm_forward_in_fp32(inputs)}
    damage(outputs, "y", reference.rmsnorm_silu_gate(inputs["x"], inputs["z"], inputs["weight"]))
    assert testing.check_rmsnorm_silu_gate(inputs, outputs["y"])["y"] > 1
    with pytest.raises(AssertionError, match=r"y\[\d+, \d+\].*x=.*z=.*weight="):
        testing.assert_rmsnorm_silu_gate(inputs, outputs["y"])


@pytest.mark.parametrize("name, damage", [(name, damage) for name in ("do1", "o2_s") for damage in ELEMENTWISE])
def test_wrong_clamped_outputs_are_refused(name, damage):
    inputs = testing.swiglu_weighted_inputs(5, 12, seed=1)
    inputs["o1"][0, [0, 1, 12, 13]] = inputs["o1"][1, [0, 1, 12, 13]] = to_bf16_bits([0.5, 0.25, -0.5, 0.25])
    inputs["o1"][4, [11, 23]] = to_bf16_bits([0.5, 0.25])
    inputs["o1"][0, 2:4] = to_bf16_bits([0.3, -0.3])
    outputs = clamped_bwd_in_fp32(inputs, CLAMPED)
    damage(outputs, name, getattr(reference.fused_swiglu_weighted_bwd(**inputs, clamp_value=CLAMPED), name))
    errors = testing.check_swiglu_weighted_bwd(inputs, outputs, CLAMPED)
    assert errors.pop(name) > 1 and max(errors.values()) <= 1


def test_a_gradient_beyond_the_clamp_is_refused():
    inputs = testing.swiglu_weighted_inputs(5, 12)
    outputs = clamped_bwd_in_fp32(inputs, CLAMPED)
    beyond = np.argwhere(to_float32(inputs["o1"])[:, :12] > CLAMPED)[0]
    outputs["do1"][tuple(beyond)] = 1  # the smallest subnormal number
    assert testing.check_swiglu_weighted_bwd(inputs, outputs, CLAMPED)["do1"] == np.inf
    assert testing.check_swiglu_weighted_bwd(inputs, clamped_bwd_in_fp32(inputs, 1.0), CLAMPED)["do1"] > 1
    assert testing.check_swiglu_weighted_bwd(inputs, swiglu_in_fp32(inputs), CLAMPED)["do1"] > 1


def test_forwards_of_a_wrong_eps_or_clamp_are_refused():
    inputs = testing.rmsnorm_silu_gate_inputs(5)
    assert testing.check_rmsnorm_silu_gate(inputs, rmsnorm_forward_in_fp32(inputs, 0.1), 0.2)["y"] > 1
    inputs = testing.swiglu_weighted_inputs(5, 12)
    assert testing.check_swiglu_weighted(inputs, swiglu_forward_in_fp32(inputs, 0.5), 0.6)["o2_s"] > 1
    for wrong in (np.zeros((5, 11), np.uint16), np.zeros((5, 12), np.float32)):
        with pytest.raises(AssertionError, match="o2_s: expected"):
            testing.check_swiglu_weighted(inputs, wrong)


@pytest.mark.parametrize("lead, width", [((0,), 8), ((4, 0), 8), ((4,), 0)])
def test_empty_forwards(lead, width):
    inputs = testing.swiglu_weighted_inputs(lead, width)
    assert testing.check_swiglu_weighted(inputs, np.zeros((*lead, width), np.uint16)) == {"o2_s": 0.0}


def test_a_reduction_that_misses_a_column_or_a_row_is_refused():
    inputs = testing.swiglu_weighted_inputs(5, 255)
    outputs = swiglu_in_fp32(inputs)
    short = {**inputs, "o1": inputs["o1"].copy()}
    short["o1"][:, 254] = 0  # the last gate: its terms vanish
    outputs["probs_grad"] = swiglu_in_fp32(short)["probs_grad"]
    assert testing.check_swiglu_weighted_bwd(inputs, outputs)["probs_grad"] > 1

    inputs = testing.rmsnorm_silu_gate_inputs(600)
    first = {name: a[:599] if a.ndim > 1 else a for name, a in inputs.items()}
    twice = {name: np.append(a, a[-1:], axis=0) if a.ndim > 1 else a for name, a in inputs.items()}
    for wrong in (first, twice):
        for dtype in ("bfloat16", "float32"):
            outputs = rmsnorm_in_fp32(inputs, dtype=dtype)
            assert testing.check_rmsnorm_silu_gate_bwd(inputs, outputs)["grad_weight"] <= 1
            outputs["grad_weight"] = rmsnorm_in_fp32(wrong, dtype=dtype)["grad_weight"]
            assert testing.check_rmsnorm_silu_gate_bwd(inputs, outputs)["grad_weight"] > 1


def test_a_mean_over_the_wrong_row_is_refused():
    inputs = testing.rmsnorm_silu_gate_inputs(2)
    outputs = rmsnorm_in_fp32(inputs)
    other = {**inputs, "grad_out": inputs["grad_out"].copy()}
    other["grad_out"][0, 0] ^= 0x8000  # one element's sign changes the mean that all others see
    outputs["grad_x"][0, 1:] = rmsnorm_in_fp32(other)["grad_x"][0, 1:]
    assert testing.check_rmsnorm_silu_gate_bwd(inputs, outputs)["grad_x"] > 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_accumulation_adds_what_was_there_once(dtype):
    inputs = testing.rmsnorm_silu_gate_inputs(40)
    initial = to_bf16_bits(np.linspace(-2, 2, 128)) if dtype == "bfloat16" else None
    if initial is None:
        initial = np.linspace(-2, 2, 128).astype(np.float32)
    fresh = rmsnorm_in_fp32(inputs, dtype=dtype)
    added = rmsnorm_in_fp32(inputs, initial=initial, dtype=dtype)
    check = testing.check_rmsnorm_silu_gate_bwd
    assert check(inputs, added, initial_grad_weight=initial)["grad_weight"] <= 1
    assert check(inputs, fresh, initial_grad_weight=initial)["grad_weight"] > 1
    assert check(inputs, added)["grad_weight"] > 1
    twice = 2 * reference.to_float64(initial)
    assert check(inputs, added, initial_grad_weight=twice)["grad_weight"] > 1


def test_a_wrong_eps_is_refused():
    inputs = testing.rmsnorm_silu_gate_inputs(40)
    outputs = rmsnorm_in_fp32(inputs, eps=0.01)
    assert max(testing.check_rmsnorm_silu_gate_bwd(inputs, outputs, eps=0.01).values()) <= 1
    assert min(testing.check_rmsnorm_silu_gate_bwd(inputs, outputs, eps=0.05).values()) > 1


def test_grad_weight_is_none_exactly_where_it_was_not_asked_for():
    inputs = testing.rmsnorm_silu_gate_inputs(3)
    outputs = rmsnorm_in_fp32(inputs)
    with pytest.raises(AssertionError, match="grad_weight"):
        testing.check_rmsnorm_silu_gate_bwd(inputs, outputs, compute_grad_weight=False)
    outputs["grad_weight"] = None
    errors = testing.check_rmsnorm_silu_gate_bwd(inputs, outputs, compute_grad_weight=False)
    assert set(errors) == {"grad_x", "grad_z"}
    with pytest.raises(AssertionError, match="grad_weight"):
        testing.check_rmsnorm_silu_gate_bwd(inputs, outputs)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("do1", np.zeros((5, 23), np.uint16)),
        ("do1", np.zeros((5, 24), np.float32)),
        ("probs_grad", np.zeros((5, 1), np.float32)),
        ("probs_grad", np.zeros((5,), np.float64)),
        ("o2_s", np.zeros((4, 12), np.uint16)),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(name, wrong):
    inputs = testing.swiglu_weighted_inputs(5, 12)
    outputs = {**swiglu_in_fp32(inputs), name: wrong}
    with pytest.raises(AssertionError, match=name):
        testing.check_swiglu_weighted_bwd(inputs, outputs)


def test_a_nan_that_is_missing_or_in_another_row_is_refused():
    inputs = testing.swiglu_weighted_inputs(5, 12)
    clean = swiglu_in_fp32(inputs)
    inputs["o1"][2, 3] = 0x7FC0
    right = swiglu_in_fp32(inputs)
    assert max(testing.check_swiglu_weighted_bwd(inputs, right).values()) <= 1
    assert set(testing.check_swiglu_weighted_bwd(inputs, clean).values()) == {np.inf}
    shifted = {name: np.roll(array, 1, axis=0) for name, array in right.items()}
    assert set(testing.check_swiglu_weighted_bwd(inputs, shifted).values()) == {np.inf}


def test_a_row_of_probability_zero_has_exact_zeros():
    inputs = testing.swiglu_weighted_inputs(3, 8)
    inputs["unzipped_probs"][1] = 0
    outputs = swiglu_in_fp32(inputs)
    assert max(testing.check_swiglu_weighted_bwd(inputs, outputs).values()) <= 1
    for name in ("do1", "o2_s"):
        damaged = {**outputs, name: outputs[name].copy()}
        damaged[name][1, 2] = 1  # the smallest subnormal number
        assert testing.check_swiglu_weighted_bwd(inputs, damaged)[name] == np.inf


@pytest.mark.parametrize(
    "got, expected, ulps",
    [
        (1.0, 1.0, 0.0),
        (1.0 + 2.0**-7, 1.0, 1.0),
        (-1.0, 1.0, 256.0),
        (1.0, np.nextafter(1.0, 0), 2.0**-45),
        (1.0, 1.0 - 2.0**-8, 1.0),  # below 1 the ulp is the finer one
        (0.0, 2.0**-133, 1.0),
        (np.inf, np.inf, 0.0),
        (np.inf, -np.inf, np.inf),
        (np.inf, BF16_MAX + 2.0**119, 0.0),  # rounds to Inf
        (np.inf, BF16_MAX, 1.0),
        (np.inf, BF16_MAX - 2.0**120, 2.0),
        (BF16_MAX, BF16_MAX + 2.0**119, 0.5),
        (BF16_MAX, 2.0**129, 257.0),
        (-BF16_MAX, 2.0**129, 767.0),
        (np.inf, 2.0**127, 128.0),
        (np.inf, 2.0**127 - 2.0**120, np.inf),
        (-np.inf, BF16_MAX, np.inf),
        (-np.inf, 1.0, np.inf),
        (np.nan, 1.0, np.inf),
        (1.0, np.nan, np.inf),
        (np.nan, np.nan, 0.0),
        (np.inf, np.nan, np.inf),
        (np.nan, np.inf, np.inf),
        (BF16_MAX, np.inf, np.inf),
    ],
)
def test_error_in_ulps(got, expected, ulps):
    assert testing.error_in_ulps(to_bf16_bits(got), expected) == ulps


def test_only_the_documented_infinities_and_nans_are_accepted():
    for accepted, value in ((1, np.inf), (2, -np.inf), (4, np.nan)):
        for bits in range(8):
            error = testing.error_in_bounds(value, 1.0, 0.5, np.uint8(bits))
            assert error == (0.0 if bits & accepted else np.inf)
            assert testing.error_in_bounds(2.0, 1.0, 0.5, np.uint8(bits)) == 2.0


def test_an_error_without_a_bound_is_refused():
    expected, bound = [1.0, 1.0, np.inf], [np.nan, 0.0, 1.0]
    found = testing.error_in_bounds([2.0, 2.0], expected[:2], bound[:2])
    assert np.array_equal(found, [np.inf, np.inf])
    found = testing.error_in_bounds([2.0, 2.0, np.inf], expected, bound)
    assert np.array_equal(found, [np.inf, np.inf, 0.0])


def test_bounds_are_what_the_promises_say():
    # One element of gate -4, up 3, d -2, p 0.5.
    result = reference.fused_swiglu_weighted_bwd([[-4.0, 3.0]], [[-2.0]], [0.5])
    s = 1 / (1 + math.exp(4.0))
    growth = 1 + 4 / 16
    gate_terms = s * (1 + 4 * (1 - s)) * 3 * growth
    gate_value, up_value = s * (1 - 4 * (1 - s)) * -3, -4 * s * -1
    bound = testing.promise1_bound(result.do1, result.magnitudes["do1"])
    np.testing.assert_allclose(result.do1, [[gate_value, up_value]], rtol=1e-14)
    ulps = [2.0 ** (math.floor(math.log2(abs(v))) - 7) for v in (gate_value, up_value)]
    expected = [ulps[0] + 2.0**-20 * gate_terms, ulps[1] + 2.0**-20 * 4 * s * growth]
    np.testing.assert_allclose(bound, [expected], rtol=1e-14)
    for dtype, unit in (("bfloat16", 2.0**-8), ("float32", 2.0**-24)):
        bound = testing.promise3_bound(result.probs_grad, result.magnitudes["probs_grad"], dtype)
        np.testing.assert_allclose(bound, [24 * s * (2.0**-20 * growth + unit)], rtol=1e-14)

    # Where sigmoid is below 2^-126: 2^-126 of the product of the other factors.
    result = reference.fused_swiglu_weighted_bwd([[-100.0, 3e10]], [[-2e5]], [0.5])
    tiny = {name: parts.tiny_sigmoid for name, parts in result.magnitudes.items()}
    np.testing.assert_allclose(tiny["do1"], [[99 * 3e15, 100 * 1e5]], rtol=1e-14)
    np.testing.assert_allclose(tiny["o2_s"], [[100 * 1.5e10]], rtol=1e-14)
    np.testing.assert_allclose(tiny["probs_grad"], [100 * 6e15], rtol=1e-14)
    bound = testing.promise1_bound(result.o2_s, result.magnitudes["o2_s"])
    assert bound > 2.0**-126 * 100 * 1.5e10
    # Gates that are not that small get nothing of it.
    result = reference.fused_swiglu_weighted_bwd([[-87.0, 3e10]], [[-2e5]], [0.5])
    assert all((parts.tiny_sigmoid == 0).all() for parts in result.magnitudes.values())


def test_bounds_of_the_gated_norm_are_what_the_promises_say():
    generator = np.random.default_rng(3)
    dy, x, z = generator.standard_normal((3, 2, 128))
    z[0, 7] = -100.0
    w = generator.standard_normal(128)
    parts = reference.cake_rmsnorm_silu_gate_train_backward(dy, x, z, w, 0.0).magnitudes
    s = 1 / (1 + np.exp(-z))
    growth = 1 + np.abs(z) / 16
    rstd = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True))
    n = np.abs(x * rstd)
    a = np.abs(z * s * dy)
    aw = a * np.abs(w) * growth
    close = {"rtol": 1e-12}
    expected = rstd * (aw + n * (aw * n).mean(axis=-1, keepdims=True))
    np.testing.assert_allclose(parts["grad_x"].terms, expected, **close)
    expected = s * (1 + np.abs(z) * (1 - s)) * np.abs(dy) * n * np.abs(w) * growth
    np.testing.assert_allclose(parts["grad_z"].terms, expected, **close)
    np.testing.assert_allclose(parts["grad_weight"].terms, (a * n * growth).sum(axis=0), **close)

    others = np.zeros_like(x)
    others[0, 7] = 100 * abs(dy[0, 7])
    expected = rstd * (others + n * (others * n).mean(axis=-1, keepdims=True) * np.abs(w[7]))
    expected[0, 7] += rstd[0, 0] * others[0, 7] * (abs(w[7]) - 1)
    np.testing.assert_allclose(parts["grad_x"].tiny_sigmoid, expected, **close)
    expected = others * 0.99 * n * np.abs(w)
    np.testing.assert_allclose(parts["grad_z"].tiny_sigmoid, expected, **close)
    expected = (others * n).sum(axis=0)
    np.testing.assert_allclose(parts["grad_weight"].tiny_sigmoid, expected, **close)


def test_underflow_is_allowed_for_only_where_a_product_underflows():
    ordinary = reference.fused_swiglu_weighted_bwd(**testing.swiglu_weighted_inputs(40, 64))
    norm = reference.cake_rmsnorm_silu_gate_train_backward(**testing.rmsnorm_silu_gate_inputs(40))
    for parts in list(ordinary.magnitudes.values()) + list(norm.magnitudes.values()):
        assert (parts.underflow == 0).all() and (parts.nonfinite == 0).all()

    # SiLU * p = 5.625 * 2^-149 is 6 * 2^-149 in FP32, and up lifts the error with it.
    gate, p, up = 1.25 * 2.0**-72, 1.125 * 2.0**-74, 2.0**120
    inputs = {
        "o1": to_bf16_bits([[gate, gate, up, up]]),
        "do2_s": to_bf16_bits([[1.0, 1.0]]),
        "unzipped_probs": np.array([p], np.float32),
    }
    result = reference.fused_swiglu_weighted_bwd(**inputs)
    parts = result.magnitudes
    assert np.array_equal(parts["o2_s"].underflow, [[2.0**-30] * 2])
    assert np.array_equal(parts["do1"].underflow, [[0.0] * 2 + [2.0**-150] * 2])
    assert (parts["probs_grad"].underflow == 0).all()
    outputs = swiglu_in_fp32(inputs)
    assert 0.5 < testing.check_swiglu_weighted_bwd(inputs, outputs)["o2_s"] <= 1
    strict = parts["o2_s"]._replace(underflow=np.zeros((1, 2)))
    bound = testing.promise1_bound(result.o2_s, strict)
    assert (testing.error_in_bounds(outputs["o2_s"], result.o2_s, bound) > 2).all()
    off_by_one = {**outputs, "o2_s": to_bf16_bits(from_bf16_bits(outputs["o2_s"]) * 7 / 6)}
    assert testing.check_swiglu_weighted_bwd(inputs, off_by_one)["o2_s"] > 2


@pytest.mark.parametrize("seed", range(40))
def test_the_gated_norm_among_subnormal_numbers_is_within_the_bounds(seed):
    # Products of dy and w below FP32's normal range; without eps, rstd then lifts them by 2^60.
    generator = np.random.default_rng(seed)
    inputs = testing.rmsnorm_silu_gate_inputs(64, seed)
    values = {name: from_bf16_bits(bits) for name, bits in inputs.items()}
    values["x"][:, 1:] *= generator.choice([1.0, 2.0**-6])  # a spike: n reaches sqrt(128)
    down = generator.uniform(100, 140)
    values["x"] *= 2.0 ** -generator.uniform(50, 74)
    values["grad_out"] *= 2.0 ** -(down / 2)
    values["weight"] *= 2.0 ** -(down / 2)
    inputs = {name: to_bf16_bits(array) for name, array in values.items()}
    outputs = rmsnorm_in_fp32(inputs, eps=0.0, dtype="float32")
    testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs, eps=0.0)

    # Normal factors, subnormal terms: each rounding counts in the sum.
    values["grad_out"] *= 2.0 ** (down / 2 - 120)
    values["x"][:, 1:] *= 2.0**-24
    inputs = {name: to_bf16_bits(array) for name, array in values.items()}
    outputs = rmsnorm_in_fp32(inputs, eps=0.0, dtype="float32")
    testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs, eps=0.0)
    inputs = testing.swiglu_weighted_inputs(8, 64, seed)
    for name in ("o1", "do2_s"):
        inputs[name] = to_bf16_bits(from_bf16_bits(inputs[name]) * 2.0**-48)
    testing.assert_swiglu_weighted_bwd(inputs, swiglu_in_fp32(inputs))


def test_rstd_is_left_to_fp32_only_at_the_ends_of_its_range():
    totals = np.array([1.0, 2.0**128 * (1 - 2.0**-10), 2.0**128 * (1 - 2.0**-20), 2.0**129, 0.0])
    error = fp32_range.rstd_error(totals, 128, 0.0)
    assert np.array_equal(error, [0, 0, np.inf, 0, 0])
    totals = 128 * 2.0 ** np.array([-119.0, -140.0, -147.0, -170.0])
    assert np.array_equal(fp32_range.rstd_error(totals, 128, 0.0), [0, 2.0**-10, np.inf, np.inf])
    assert (fp32_range.rstd_error(totals, 128, 1e-30) == 0).all()


def test_a_mean_that_overflows_before_its_end_may_be_inf():
    inputs = testing.rmsnorm_silu_gate_inputs(2)
    for name in ("x", "z", "weight"):
        inputs[name][...] = to_bf16_bits(1.0)
    inputs["grad_out"][0] = to_bf16_bits(np.where(np.arange(128) < 64, 3e37, -3e37))
    right = rmsnorm_in_fp32(inputs)
    assert testing.check_rmsnorm_silu_gate_bwd(inputs, right)["grad_x"] < 0.51
    for bits in (0x7F80, 0xFF80, 0x7FC0):
        outputs = {**right, "grad_x": right["grad_x"].copy()}
        outputs["grad_x"][0, 9] = bits
        assert testing.check_rmsnorm_silu_gate_bwd(inputs, outputs)["grad_x"] < 0.51
        outputs["grad_x"][1, 9] = bits
        assert testing.check_rmsnorm_silu_gate_bwd(inputs, outputs)["grad_x"] == np.inf


def test_overflow_on_the_way_allows_for_inf_and_nothing_else():
    # SiLU * p is past FP32's range, up brings the true value back into it.
    inputs = {
        "o1": to_bf16_bits([[1e30, 1e30, 1e-20, -1e-20]]),
        "do2_s": to_bf16_bits([[1.0, 1.0]]),
        "unzipped_probs": np.array([1e10], np.float32),
    }
    outputs = swiglu_in_fp32(inputs)
    assert np.array_equal(from_bf16_bits(outputs["o2_s"]), [[np.inf, -np.inf]])
    assert testing.check_swiglu_weighted_bwd(inputs, outputs)["o2_s"] == 0
    exact = reference.fused_swiglu_weighted_bwd(**inputs).o2_s
    assert np.array_equal(np.sign(exact), [[1, -1]]) and (np.abs(exact) < 1.01e20).all()
    true_value = {**outputs, "o2_s": to_bf16_bits(exact)}
    assert testing.check_swiglu_weighted_bwd(inputs, true_value)["o2_s"] < 0.51
    for wrong in ([[-np.inf, -np.inf]], [[np.inf, np.nan]], [[np.inf, 0.0]]):
        damaged = {**outputs, "o2_s": to_bf16_bits(wrong)}
        assert testing.check_swiglu_weighted_bwd(inputs, damaged)["o2_s"] > 1


def test_rows_past_the_range_of_the_square_sum_give_what_fp32_gives():
    inputs = testing.rmsnorm_silu_gate_inputs(4)
    inputs["x"][1] = to_bf16_bits(np.linspace(1e19, 3e19, 128))
    inputs["x"][2] = to_bf16_bits(np.linspace(1e-30, 3e-30, 128))
    for eps in (0.0, 1e-6):
        outputs = rmsnorm_in_fp32(inputs, eps)
        testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs, eps)
    assert (from_bf16_bits(outputs["grad_x"][1]) == 0).all()
    damaged = {**outputs, "grad_x": outputs["grad_x"].copy()}
    damaged["grad_x"][1, 9] = to_bf16_bits(1e-3)
    assert testing.check_rmsnorm_silu_gate_bwd(inputs, damaged)["grad_x"] > 1
    # With eps the tiny row is an ordinary one.
    damaged = {**outputs, "grad_x": outputs["grad_x"].copy()}
    damaged["grad_x"][2, 9] ^= 0x0008
    assert testing.check_rmsnorm_silu_gate_bwd(inputs, damaged)["grad_x"] > 1


def test_the_range_test_sees_small_large_and_odd_factors():
    inside = fp32_range.products_stay_inside
    assert inside([np.array([1.0, 0.0, -3.0]), np.zeros((0, 4)), np.full(3, 1e20)])
    assert not inside([np.full(3, 1e-20), np.full(3, -1e-20)])
    assert not inside([np.full(3, 1e20), np.full(3, -1e20)])
    assert not inside([np.array([1.0, np.nan])])
    assert not inside([np.array([1.0, np.inf])])


def test_a_failure_says_what_and_where():
    inputs = testing.swiglu_weighted_inputs((2, 3), 4)
    inputs["o1"][1, 2, 3] = to_bf16_bits(0.5)
    inputs["o1"][1, 2, 7] = to_bf16_bits(-1.5)
    inputs["do2_s"][1, 2, 3] = to_bf16_bits(2.0)
    inputs["unzipped_probs"][1, 2] = 0.25
    outputs = swiglu_in_fp32(inputs)
    outputs["do1"][1, 2, 7] = to_bf16_bits(7.0)
    with pytest.raises(AssertionError) as failure:
        testing.assert_swiglu_weighted_bwd(inputs, outputs)
    message = str(failure.value)
    assert message.startswith("do1[1, 2, 7] (bfloat16): got 7, expected 0.155614")
    for part in ("times the bound", "gate=0.5", "up=-1.5", "d=2", "prob=0.25"):
        assert part in message
    outputs = swiglu_in_fp32(inputs)
    outputs["probs_grad"][1, 2] = 99
    with pytest.raises(AssertionError, match=r"^probs_grad\[1, 2\] \(float32\): got 99,.*=0.25"):
        testing.assert_swiglu_weighted_bwd(inputs, outputs)

    inputs = testing.rmsnorm_silu_gate_inputs((300, 2))  # past the first block
    for name in ("grad_out", "x", "z"):
        inputs[name][299, 1, 5] = to_bf16_bits({"grad_out": 2.0, "x": 3.0, "z": -4.0}[name])
    inputs["weight"][5] = to_bf16_bits(0.75)
    outputs = rmsnorm_in_fp32(inputs)
    outputs["grad_z"][299, 1, 5] = to_bf16_bits(7.0)
    with pytest.raises(AssertionError) as failure:
        testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs)
    message = str(failure.value)
    assert message.startswith("grad_z[299, 1, 5] (bfloat16): got 7, expected -")
    for part in ("grad_out=2", "x=3", "z=-4", "weight=0.75"):
        assert part in message


# Inputs and views


def test_random_inputs_are_repeatable_and_of_magnitude_one():
    for make in (
        lambda seed: testing.swiglu_weighted_inputs((40, 5), 32, seed),
        lambda seed: testing.rmsnorm_silu_gate_inputs((40, 5), seed),
    ):
        first, second, other = make(3), make(3), make(4)
        for name, array in first.items():
            assert np.array_equal(array, second[name])
            assert not np.array_equal(array, other[name])
            values = reference.to_float64(array)
            assert np.isfinite(values).all() and 0.4 < np.sqrt(np.mean(values**2)) < 1.2
            if array.ndim > 2:
                columns = values.reshape(-1, values.shape[-1]).T
                assert len(np.unique(columns, axis=0)) == len(columns)
    weight = from_bf16_bits(testing.rmsnorm_silu_gate_inputs(1)["weight"])
    assert len(np.unique(np.abs(weight))) == 128


def values_for(kind, dtype, shape):
    generator = np.random.default_rng(5)
    values = generator.standard_normal(shape)
    if kind == "broadcast_row":
        values = np.broadcast_to(values.reshape((-1,) + shape[-1:])[0], shape)
        values = values if len(shape) > 1 else np.full(shape, 0.5)
    return to_bf16_bits(values) if dtype == "bfloat16" else values.astype(np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tensors_come_back_as_they_went(place, dtype):
    import paddle

    if dtype == "bfloat16":
        make, read, values = testing.bf16_tensor, testing.bits_of, ALL_BITS.reshape(4, 128, 128)
    else:
        make, read = testing.float_tensor, testing.floats_of
        values = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    other = testing.floats_of if dtype == "bfloat16" else testing.bits_of
    for array in (values, values[0, 0], values[:0]):
        for where in (place, None):
            tensor = make(array, where)
            assert tensor.dtype == getattr(paddle, dtype)
            assert tensor.place.is_gpu_place() == place.startswith("gpu")
            assert tensor.stop_gradient
            assert list(tensor.shape) == list(np.shape(array))
            assert read(tensor).tobytes() == array.tobytes()  # NaN payloads too
            with pytest.raises(TypeError, match=dtype):
                other(tensor)
    assert not make(values, place, stop_gradient=False).stop_gradient
    with pytest.raises(ValueError, match="contiguous"):
        read(make(values, place)[..., ::2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 128)])
@pytest.mark.parametrize("kind", testing.VIEW_KINDS)
def test_views_hold_their_values_between_intact_canaries(place, kind, shape, dtype):
    values = values_for(kind, dtype, shape)
    view, base = testing.strided_view(values, kind, place)
    assert list(view.shape) == list(shape)
    assert np.array_equal(testing.read_view(view, base), values)
    assert testing.damaged_canaries(view, base) == 0
    if place == "cpu":  # Paddle can gather a strided tensor here: an independent reading
        assert np.array_equal(view.numpy(), values)
    held = 1 if len(shape) == 1 else shape[-1]
    held = held if kind == "broadcast_row" else values.size
    canaries = math.prod(base.shape) - held
    assert canaries >= 3
    assert testing.damaged_canaries(view, base, canary=2.0) == canaries


def test_views_have_the_layout_that_their_kind_says(place):
    values = values_for("contiguous", "bfloat16", (3, 5, 8))

    def layout(kind, values=values):
        view, base = testing.strided_view(values, kind, place)
        return list(view.strides), (view.data_ptr() - base.data_ptr()) // 2

    assert layout("contiguous") == ([40, 8, 1], 64)
    assert layout("offset") == ([40, 8, 1], 65)
    assert layout("column_slice") == ([80, 16, 1], 3)
    assert layout("packed") == ([160, 32, 1], 8)
    assert layout("step2") == ([100, 20, 2], 2)
    assert layout("reversed") == ([80, 16, -1], 10)
    assert layout("transposed") == ([1, 3, 15], 15)
    assert layout("row_slice") == ([40, 8, 1], 80)
    assert layout("broadcast_row", np.tile(values[:1, :1], (3, 5, 1))) == ([0, 0, 1], 0)
    table = values_for("transposed", "bfloat16", (8,))
    assert layout("transposed", table) == ([3], 4)


def test_views_of_rank_0_and_of_nothing(place):
    for kind in testing.VIEW_KINDS:
        view, base = testing.strided_view(np.zeros((3, 0), np.uint16), kind, place)
        assert list(view.shape) == [3, 0]
        assert testing.read_view(view, base).shape == (3, 0)
        assert testing.damaged_canaries(view, base) == 0
        scalar = np.array(0.5, np.float32)
        if kind in ("contiguous", "offset"):
            view, base = testing.strided_view(scalar, kind, place)
            assert list(view.shape) == [] and testing.read_view(view, base) == 0.5
        else:
            with pytest.raises(ValueError, match="rank 0"):
                testing.strided_view(scalar, kind, place)


def test_views_refuse_what_they_cannot_make(monkeypatch):
    with pytest.raises(ValueError, match="broadcast_row"):
        testing.strided_view(np.arange(6, dtype=np.float32).reshape(2, 3), "broadcast_row", "cpu")
    with pytest.raises(ValueError, match="kind"):
        testing.strided_view(np.zeros(3, np.float32), "diagonal", "cpu")
    with pytest.raises(TypeError, match="float64"):
        testing.strided_view(np.zeros(3), "contiguous", "cpu")
    view, _ = testing.strided_view(np.zeros(3, np.float32), "contiguous", "cpu")
    with pytest.raises(RuntimeError, match="copy"):
        testing.read_view(view, testing.float_tensor(np.zeros(200), "cpu"))
    copy = lambda values, fill: (values, lambda base: base.clone())  # noqa: E731
    monkeypatch.setitem(testing.inputs._BUILDERS, "step2", copy)
    with pytest.raises(RuntimeError, match="copy"):
        testing.strided_view(np.zeros(3, np.float32), "step2", "cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", testing.VIEW_KINDS)
def test_a_write_beside_a_view_shows_and_one_into_it_does_not(kind, dtype):
    values = values_for(kind, dtype, (4, 6))
    view, base = testing.strided_view(values, kind, "cpu")
    number = ctypes.c_uint16 if dtype == "bfloat16" else ctypes.c_float
    memory = (number * math.prod(base.shape)).from_address(base.data_ptr())

    memory[(view.data_ptr() - base.data_ptr()) // ctypes.sizeof(number)] = 3
    assert testing.damaged_canaries(view, base) == 0
    assert testing.read_view(view, base)[0, 0] == 3
    memory[math.prod(base.shape) - 1] = 3
    assert testing.damaged_canaries(view, base) == 1


def test_an_infinity_within_the_bound_is_no_error():
    """Cancelled terms past FP32's range: the value may come out as either infinity, where the bound reaches that far."""
    assert testing.error_in_bounds(np.inf, -5.0e38, 3.2e40) <= 1
    assert testing.error_in_bounds(np.inf, -5.0e38, 1e38) == np.inf
    assert testing.error_in_bounds(np.inf, 1.0, 1e38) == np.inf
