"""The forwards: values against float64, the bits of the backward's recomputed output, views, empty tensors, errors."""

import itertools

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import BAD_CLAMP_VALUES, RMSNORM_INPUTS, array_of, peak_of, raw, run_python, tensor_of, tensors_of
from paddle_gated_ops import testing
from paddle_gated_ops.testing import from_bf16_bits, to_bf16_bits

SWIGLU = ("o1", "unzipped_probs")
RMSNORM = RMSNORM_INPUTS[1:]
KINDS = [kind for kind in testing.VIEW_KINDS if kind not in ("contiguous", "broadcast_row")]
NAN = 0x7FC0


def swiglu_arrays(rows, width, seed=0):
    """The forward's inputs, and do2_s for the backward that recomputes it."""
    return testing.swiglu_weighted_inputs(rows, width, seed)


def rmsnorm_arrays(rows, seed=0):
    inputs = testing.rmsnorm_silu_gate_inputs(rows, seed)
    return {name: inputs[name] for name in RMSNORM}


def swiglu(inputs, place, views=None, **options):
    tensors = tensors_of({name: inputs[name] for name in SWIGLU}, place, views)
    return array_of(F.fused_swiglu_weighted(**tensors, **options))


def rmsnorm(inputs, place, views=None, **options):
    return array_of(F.cake_rmsnorm_silu_gate(**tensors_of(inputs, place, views), **options))


# ---- Values


@pytest.mark.parametrize("width", [*range(1, 10), 12, 66, 101, 127, 128, 129, 255, 256, 257, 264, 1408, 3586])
def test_swiglu_values(place, width):
    inputs = swiglu_arrays(5, width, seed=width)
    got = swiglu(inputs, place)
    testing.assert_swiglu_weighted(inputs, got)
    recomputed = F.fused_swiglu_weighted_bwd(**tensors_of(inputs, place))[2]
    np.testing.assert_array_equal(got, array_of(recomputed))


@pytest.mark.parametrize("lead", [(), (1,), (5,), (3, 5), (2, 3, 5), (2, 1, 3, 2)])
def test_leading_shapes(place, lead):
    inputs = swiglu_arrays(lead, 24)
    got = swiglu(inputs, place)
    assert got.shape == lead + (24,)
    testing.assert_swiglu_weighted(inputs, got)
    column = {**inputs, "unzipped_probs": inputs["unzipped_probs"].reshape(lead + (1,))}
    np.testing.assert_array_equal(swiglu(column, place), got)
    inputs = rmsnorm_arrays(lead)
    got = rmsnorm(inputs, place)
    assert got.shape == lead + (128,)
    testing.assert_rmsnorm_silu_gate(inputs, got)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 255, 256, 257, 1000, 9000])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 0.1, 1])
def test_rmsnorm_values(place, rows, eps):
    inputs = rmsnorm_arrays(rows, seed=rows)
    testing.assert_rmsnorm_silu_gate(inputs, rmsnorm(inputs, place, eps=eps), eps)


def test_default_eps(place):
    inputs = rmsnorm_arrays(4)
    inputs["x"] = to_bf16_bits(from_bf16_bits(inputs["x"]) * 1e-3)  # eps shows
    np.testing.assert_array_equal(rmsnorm(inputs, place), rmsnorm(inputs, place, eps=1e-6))
    assert (rmsnorm(inputs, place) != rmsnorm(inputs, place, eps=1e-5)).any()


GATES = [-3e38, -1e4, -103.0, -89.0, -88.0, -87.0, -1.0, -0.0, 0.0, 1.0, 88.0, 1e4, 3e38]


@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
def test_swiglu_at_extreme_gates(place, size):
    rows = list(itertools.product(GATES, (1.0, -1.0), (1.0, -0.25, 0.0)))
    gate, sign, prob = (np.array(column)[:, None] for column in zip(*rows))
    inputs = {"o1": to_bf16_bits(np.concatenate([gate, sign * size], 1)), "unzipped_probs": np.float32(prob[:, 0])}
    testing.assert_swiglu_weighted(inputs, swiglu(inputs, place))


def test_swiglu_at_every_gate(place):
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    one = np.full_like(bits, to_bf16_bits(1.0))
    inputs = {"o1": np.stack([bits, one], 1), "unzipped_probs": np.ones(bits.size, np.float32)}
    testing.assert_swiglu_weighted(inputs, swiglu(inputs, place))


@pytest.mark.parametrize("weight", [1.0, 1e30, 3e38, 1e-30])
@pytest.mark.parametrize("size", [1.0, 1e15, 1e-15])
def test_rmsnorm_at_extreme_gates(place, size, weight):
    inputs = rmsnorm_arrays(len(GATES))
    inputs["x"] = to_bf16_bits(from_bf16_bits(inputs["x"]) * size)
    inputs["z"] = to_bf16_bits(np.broadcast_to(np.array(GATES)[:, None], (len(GATES), 128)))
    inputs["weight"] = to_bf16_bits(from_bf16_bits(inputs["weight"]) * weight / 1.5)
    testing.assert_rmsnorm_silu_gate(inputs, rmsnorm(inputs, place))


def test_a_vanishing_gate_makes_no_nan(place):
    # n * weight is past FP32's range there, and must not meet the gate's zero.
    inputs = rmsnorm_arrays(1)
    inputs["x"] = to_bf16_bits(np.eye(1, 128))  # n = sqrt(128) in the first column
    inputs["weight"], inputs["z"] = to_bf16_bits(np.full(128, 3e38)), to_bf16_bits(np.full((1, 128), -1e4))
    assert not np.isnan(from_bf16_bits(rmsnorm(inputs, place))).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_stay_in_their_row(place, value):
    for arrays, run, names in (
        (swiglu_arrays(9, 40), swiglu, ["o1"]),
        (rmsnorm_arrays(9), rmsnorm, ["x", "z"]),
    ):
        expected = run(arrays, place)
        for name in names:
            inputs = {n: a.copy() for n, a in arrays.items()}
            inputs[name][4, 3] = to_bf16_bits(value)
            got = run(inputs, place)
            others = np.arange(9) != 4
            np.testing.assert_array_equal(got[others], expected[others])
            assert not np.isfinite(from_bf16_bits(got[4])).all() or (name == "x" and np.isinf(value))


def test_probability_zero_makes_exact_zeros(place):
    inputs = swiglu_arrays(3, 20)
    inputs["unzipped_probs"][1] = 0
    got = from_bf16_bits(swiglu(inputs, place))
    assert (got[1] == 0).all() and (got[[0, 2]] != 0).all()


# ---- The same bits, always

REPEAT = """
import hashlib
import paddle_gated_ops.incubate.nn.functional as F
from calls import array_of, tensor_of
from paddle_gated_ops import testing
digest = hashlib.sha256()
for width in (768, 101):
    inputs = testing.swiglu_weighted_inputs(3000, width, seed=1)
    for clamp in (None, 0.5):
        o2_s = F.fused_swiglu_weighted(tensor_of(inputs["o1"], "cpu"), tensor_of(inputs["unzipped_probs"], "cpu"), clamp)
        digest.update(array_of(o2_s).tobytes())
inputs = testing.rmsnorm_silu_gate_inputs(30000, seed=1)
y = F.cake_rmsnorm_silu_gate(*(tensor_of(inputs[name], "cpu") for name in ("x", "z", "weight")))
digest.update(array_of(y).tobytes())
print(digest.hexdigest())
"""


def test_bits_do_not_depend_on_threads_or_vectors():
    expected = run_python(REPEAT, GATED_OPS_NUM_THREADS="1", GATED_OPS_CPU_ISA=None)
    for threads, isa in (("8", None), (None, "avx2"), (None, "avx512")):
        assert run_python(REPEAT, GATED_OPS_NUM_THREADS=threads, GATED_OPS_CPU_ISA=isa) == expected, (threads, isa)


def test_a_row_does_not_depend_on_the_others(place):
    inputs = swiglu_arrays(300, 130)
    whole = swiglu(inputs, place)
    np.testing.assert_array_equal(swiglu({n: a[7:8] for n, a in inputs.items()}, place), whole[7:8])
    inputs = rmsnorm_arrays(600)
    whole = rmsnorm(inputs, place)
    one = {n: a if n == "weight" else a[300:301] for n, a in inputs.items()}
    np.testing.assert_array_equal(rmsnorm(one, place), whole[300:301])


# ---- Views


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SWIGLU)
def test_swiglu_views(place, name, kind):
    for lead, width in (((6,), 7), ((9,), 8), ((5,), 264), ((3, 5), 16), ((2, 3, 4), 5)):
        inputs = swiglu_arrays(lead, width, seed=width)
        np.testing.assert_array_equal(swiglu(inputs, place, {name: kind}), swiglu(inputs, place))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RMSNORM)
def test_rmsnorm_views(place, name, kind):
    for lead in ((37,), (3, 5), (2, 3, 4)):
        inputs = rmsnorm_arrays(lead)
        np.testing.assert_array_equal(rmsnorm(inputs, place, {name: kind}), rmsnorm(inputs, place))


@pytest.mark.parametrize("wanted", [False, True])
def test_views_are_not_copied(wanted):
    # One row 4096 times: a copy of it would be as large as the output, or larger.
    rows = 4096
    swiglu_inputs, norm_inputs = swiglu_arrays(1, 128), rmsnorm_arrays(1)
    o1 = paddle.as_strided(tensor_of(swiglu_inputs["o1"], "cpu"), [rows, 256], [0, 1])
    probs = paddle.as_strided(tensor_of(swiglu_inputs["unzipped_probs"], "cpu"), [rows], [0])
    x, z = (paddle.as_strided(tensor_of(norm_inputs[n], "cpu"), [rows, 128], [0, 1]) for n in ("x", "z"))
    weight = tensor_of(norm_inputs["weight"], "cpu")
    for tensor in (o1, x):
        tensor.stop_gradient = not wanted
    output = 2 * 128 * rows
    for call in (lambda: F.fused_swiglu_weighted(o1, probs), lambda: F.cake_rmsnorm_silu_gate(x, z, weight)):
        assert output <= peak_of(call) < 1.25 * output


# ---- Empty tensors


@pytest.mark.parametrize("lead", [(0,), (0, 16), (4, 0)])
def test_no_rows(place, lead):
    for run, inputs, width in ((swiglu, swiglu_arrays(lead, 8), 8), (rmsnorm, rmsnorm_arrays(lead), 128)):
        got = run(inputs, place)
        assert got.shape == lead + (width,) and got.dtype == np.uint16


def test_no_columns(place):
    assert swiglu(swiglu_arrays(4, 0), place).shape == (4, 0)


# ---- Outputs and inputs


def test_new_outputs_and_untouched_inputs(place):
    for arrays, names, function in (
        (swiglu_arrays(20, 40), SWIGLU, F.fused_swiglu_weighted),
        (rmsnorm_arrays(20), RMSNORM, F.cake_rmsnorm_silu_gate),
        (rmsnorm_arrays(20), RMSNORM, F.cake_rmsnorm_silu_gate_train_forward),
    ):
        tensors = tensors_of({name: arrays[name] for name in names}, place)
        first, second = function(**tensors), function(**tensors)
        np.testing.assert_array_equal(array_of(first), array_of(second))
        assert first.stop_gradient and first.is_leaf and first.is_contiguous() and first.inplace_version == 0
        assert str(first.place) == str(tensors[names[0]].place)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(raw(array_of(tensor)), raw(arrays[name]))
            assert tensor.inplace_version == 0


# ---- cake_rmsnorm_silu_gate_train_forward


def train_forward(tensors, **options):
    return F.cake_rmsnorm_silu_gate_train_forward(**tensors, **options)


def test_train_forward_is_the_forward_without_autograd(place):
    inputs = rmsnorm_arrays((3, 5))
    tensors = tensors_of(inputs, place)
    for tensor in tensors.values():
        tensor.stop_gradient = False
    for options in ({}, {"eps": 0.1}):
        y = train_forward(tensors, **options)
        assert y.stop_gradient and y.grad_fn is None
        np.testing.assert_array_equal(array_of(y), rmsnorm(inputs, place, **options))


@pytest.mark.parametrize("kind", ["contiguous", *KINDS])
def test_out_of_any_layout(place, kind):
    inputs = rmsnorm_arrays((3, 5))
    out, base = testing.strided_view(np.full((3, 5, 128), NAN, np.uint16), kind, place)
    returned = train_forward(tensors_of(inputs, place), out=out)
    assert returned is out and out.inplace_version == 1
    np.testing.assert_array_equal(testing.read_view(out, base), rmsnorm(inputs, place))
    assert testing.damaged_canaries(out, base) == 0


@pytest.mark.parametrize("kind", ["contiguous", "step2", "transposed", "reversed"])
@pytest.mark.parametrize("name", ["x", "z"])
def test_out_in_the_place_of_an_input(place, name, kind):
    inputs = rmsnorm_arrays(600)
    expected = rmsnorm(inputs, place)
    tensors = tensors_of(inputs, place)
    tensors[name], base = testing.strided_view(inputs[name], kind, place)
    assert train_forward(tensors, out=tensors[name]) is tensors[name]
    np.testing.assert_array_equal(testing.read_view(tensors[name], base), expected)


def test_out_that_overlaps(place):
    inputs = rmsnorm_arrays(8)
    tensors = tensors_of(inputs, place)
    base = tensor_of(np.concatenate([inputs["x"], inputs["x"][:1]]), place)
    for name, options in {
        "x": {"x": base[:8], "out": base[1:]},
        "z": {"z": base[:8], "out": base[1:]},
        "weight": {"weight": base[0], "out": base[:8]},
    }.items():
        with pytest.raises(ValueError, match=rf"train_forward: out must .*\b{name}\b"):
            train_forward({**tensors, **options})
    itself = paddle.as_strided(base, [8, 128], [0, 1])
    with pytest.raises(ValueError, match=r"train_forward: out must have a place of its own"):
        train_forward(tensors, out=itself)
    np.testing.assert_array_equal(array_of(base), np.concatenate([inputs["x"], inputs["x"][:1]]))


def test_out_that_is_a_trainable_leaf(place):
    tensors = tensors_of(rmsnorm_arrays(8), place)
    out = tensor_of(np.full((8, 128), NAN, np.uint16), place)
    out.stop_gradient = False
    with pytest.raises(ValueError, match=r"train_forward: out is a leaf"):
        train_forward(tensors, out=out)
    assert (array_of(out.detach()) == NAN).all()
    with paddle.no_grad():
        assert train_forward(tensors, out=out) is out
    assert (array_of(out.detach()) != NAN).all()


@pytest.mark.parametrize("out, error", [
    (np.zeros((8, 128), np.float32), ValueError),
    (np.zeros((7, 128), np.uint16), ValueError),
    (np.zeros((8, 127), np.uint16), ValueError),
    (np.zeros((8, 1, 128), np.uint16), ValueError),
    (3, TypeError),
    ("x", TypeError),
])
def test_wrong_out(place, out, error):
    out = tensor_of(out, place) if isinstance(out, np.ndarray) else out
    with pytest.raises(error, match=r"cake_rmsnorm_silu_gate_train_forward: out must"):
        train_forward(tensors_of(rmsnorm_arrays(8), place), out=out)


def test_train_forward_is_for_eager_mode():
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            x = paddle.static.data("x", [4, 128], "bfloat16")
            with pytest.raises(ValueError, match="cake_rmsnorm_silu_gate_train_forward is for eager mode"):
                F.cake_rmsnorm_silu_gate_train_forward(x, x, x)
    finally:
        paddle.disable_static()


# ---- Errors

NO_TENSORS = [None, 3, 1.5, "x", np.zeros((4, 128), np.float32), [1.0]]
IDS = [type(value).__name__ for value in NO_TENSORS]


@pytest.fixture(params=[False, True], ids=["no gradients", "gradients"])
def tensors(request, place):
    """Inputs of both ops; both ways through the functions make the same checks."""
    arrays = {**swiglu_arrays(4, 8), **rmsnorm_arrays(4)}
    tensors = tensors_of(arrays, place)
    for tensor in tensors.values():
        tensor.stop_gradient = not request.param
    return tensors


def call(tensors, **changed):
    """The function that the changed argument belongs to."""
    of_swiglu = any(name in (*SWIGLU, "clamp_value") for name in changed)
    names, function = (SWIGLU, F.fused_swiglu_weighted) if of_swiglu else (RMSNORM, F.cake_rmsnorm_silu_gate)
    return function(**{**{name: tensors[name] for name in names}, **changed})


@pytest.mark.parametrize("value", NO_TENSORS, ids=IDS)
@pytest.mark.parametrize("name", SWIGLU + RMSNORM)
def test_no_tensor(tensors, name, value):
    with pytest.raises(TypeError, match=rf": {name} must be a paddle.Tensor, but is "):
        call(tensors, **{name: value})


@pytest.mark.parametrize("name", SWIGLU + RMSNORM)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "int32", "bool"])
def test_wrong_dtype(tensors, place, name, dtype):
    right = "float32" if name == "unzipped_probs" else "bfloat16"
    if dtype == right:
        call(tensors, **{name: tensors[name]})
        return
    shape = tensors[name].shape
    if dtype == "bfloat16":
        wrong = tensor_of(np.zeros(shape, np.uint16), place)
    else:
        wrong = paddle.to_tensor(np.zeros(shape, dtype), place=place)
    with pytest.raises(ValueError, match=rf": {name} must have dtype {right}, but has {dtype}"):
        call(tensors, **{name: wrong})


WRONG_SHAPES = {
    "o1": [(4, 15), (), (15,)],
    "unzipped_probs": [(), (3,), (1,), (4, 2), (4, 1, 1), (4, 8)],
    "x": [(), (4, 127), (4, 256), (0,)],
    "z": [(), (128,), (3, 128), (1, 128), (4, 127), (4, 1, 128)],
    "weight": [(), (127,), (1, 128), (4, 128), (1,)],
}


@pytest.mark.parametrize("name, shape", [(name, shape) for name, shapes in WRONG_SHAPES.items() for shape in shapes])
def test_wrong_shape(tensors, place, name, shape):
    wrong = tensor_of(np.zeros(shape, np.float32 if name == "unzipped_probs" else np.uint16), place)
    with pytest.raises(ValueError, match=rf": {name} must have "):
        call(tensors, **{name: wrong})


@pytest.mark.parametrize("eps, error", [
    (-1e-6, ValueError),
    (float("nan"), ValueError),
    (float("inf"), ValueError),
    (1e39, ValueError),
    (-1e-60, ValueError),
    ("1e-6", TypeError),
    (None, TypeError),
    (True, TypeError),
])
def test_wrong_eps(tensors, eps, error):
    with pytest.raises(error, match=r"cake_rmsnorm_silu_gate: eps must be "):
        call(tensors, eps=eps)
    with pytest.raises(error, match=r"cake_rmsnorm_silu_gate_train_forward: eps must be "):
        F.cake_rmsnorm_silu_gate_train_forward(*(tensors[name] for name in RMSNORM), eps=eps)


@pytest.mark.parametrize("clamp_value, error", BAD_CLAMP_VALUES)
def test_wrong_clamp_value(tensors, clamp_value, error):
    with pytest.raises(error, match=r"fused_swiglu_weighted: clamp_value must be "):
        call(tensors, clamp_value=clamp_value)


def test_names_of_the_errors(tensors):
    with pytest.raises(TypeError, match=r"^fused_swiglu_weighted: o1\b"):
        call(tensors, o1=None)
    with pytest.raises(TypeError, match=r"^cake_rmsnorm_silu_gate: x\b"):
        call(tensors, x=None)
    with pytest.raises(TypeError, match=r"^cake_rmsnorm_silu_gate_train_forward: x\b"):
        F.cake_rmsnorm_silu_gate_train_forward(None, tensors["z"], tensors["weight"])


def test_name_is_accepted(tensors):
    call(tensors, clamp_value=None, name="unused")
