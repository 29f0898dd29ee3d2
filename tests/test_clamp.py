"""The clamped form of weighted SwiGLU: values, where the gradient passes, NaN, errors; in eager mode and in graphs."""

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import BAD_CLAMP_VALUES, SWIGLU_INPUTS, array_of, assert_same_bits, run_swiglu, tensor_of, tensors_of
from paddle_gated_ops import testing
from paddle_gated_ops.testing import from_bf16_bits, to_bf16_bits

OUTPUTS = ("do1", "probs_grad", "o2_s")
BELOW, ABOVE = -(2.0**-7), 2.0**-6  # to the BF16 neighbours of 2 on either side


def run_clamped(inputs, place, clamp_value, views=None):
    outputs = F.fused_swiglu_weighted_clamp_bwd(**tensors_of(inputs, place, views), clamp_value=clamp_value)
    return dict(zip(OUTPUTS, map(array_of, outputs)))


def forward(inputs, place, clamp_value):
    return array_of(
        F.fused_swiglu_weighted(
            tensor_of(inputs["o1"], place), tensor_of(inputs["unzipped_probs"], place), clamp_value=clamp_value
        )
    )


@pytest.mark.parametrize("clamp_value", [1e-3, 0.1, 0.5, 1, 1.75, 7.0, np.float32(0.3), 1e30])
@pytest.mark.parametrize("lead, width", [((5,), 7), ((64,), 129), ((3, 5), 264), ((2,), 1408)])
def test_values(place, lead, width, clamp_value):
    inputs = testing.swiglu_weighted_inputs(lead, width, seed=width)
    got = run_clamped(inputs, place, clamp_value)
    testing.assert_swiglu_weighted_bwd(inputs, got, clamp_value)
    o2_s = forward(inputs, place, clamp_value)
    testing.assert_swiglu_weighted(inputs, o2_s, clamp_value)
    np.testing.assert_array_equal(o2_s, got["o2_s"])


def test_a_clamp_that_clamps_nothing_changes_no_bit(place):
    inputs = testing.swiglu_weighted_inputs(50, 200)
    assert_same_bits(run_clamped(inputs, place, 1e30), run_swiglu(inputs, place))
    np.testing.assert_array_equal(forward(inputs, place, 1e30), forward(inputs, place, None))


def pairs(gates, ups):
    """One row of every gate beside every up."""
    gate, up = (grid.ravel() for grid in np.meshgrid(gates, ups))
    return {
        "o1": to_bf16_bits(np.concatenate([gate, up]))[None],
        "do2_s": to_bf16_bits(np.linspace(1, 2, gate.size))[None],
        "unzipped_probs": np.array([0.75], np.float32),
    }, gate, up


def test_the_gradient_passes_at_equality_and_is_zero_beyond(place):
    c = 2.0
    gates = [-3.0, -2.0, 1.0, c + BELOW, c, c + ABOVE, 50.0]
    inputs, gate, up = pairs(gates, [-50.0, -c - ABOVE, -c, -c - BELOW, 0.5, c, c + ABOVE])
    do1 = from_bf16_bits(run_clamped(inputs, place, c)["do1"])[0]
    gate_grad, up_grad = np.split(do1, 2)
    np.testing.assert_array_equal(gate_grad != 0, gate <= c)
    np.testing.assert_array_equal(up_grad != 0, np.abs(up) <= c)
    # What is not beyond has the gradient of the clamped values.
    clamped = {**inputs, "o1": to_bf16_bits(np.concatenate([np.minimum(gate, c), np.clip(up, -c, c)]))[None]}
    expected = np.split(from_bf16_bits(run_swiglu(clamped, place)["do1"])[0], 2)
    np.testing.assert_array_equal(gate_grad, np.where(gate <= c, expected[0], 0.0))
    np.testing.assert_array_equal(up_grad, np.where(np.abs(up) <= c, expected[1], 0.0))


def test_gates_are_clamped_above_alone(place):
    inputs, _, _ = pairs([-30.0, -5.0], [0.5, -0.5])
    assert_same_bits(run_clamped(inputs, place, 1.0), run_swiglu(inputs, place))


@pytest.mark.parametrize("half", ["gate", "up"])
def test_nan_passes(place, half):
    inputs = testing.swiglu_weighted_inputs(3, 8)
    at = 2 if half == "gate" else 8 + 2
    inputs["o1"][1, at] = to_bf16_bits(np.nan)
    got = {name: testing.reference.to_float64(array) for name, array in run_clamped(inputs, place, 0.5).items()}
    assert np.isnan(got["o2_s"][1, 2]) and np.isnan(got["probs_grad"][1])
    assert np.isnan(got["do1"][1, 2])  # the gate's gradient needs gate and up
    assert np.isnan(got["do1"][1, 8 + 2]) == (half == "gate" and abs(from_bf16_bits(inputs["o1"][1, 10])) <= 0.5)
    assert np.isnan(from_bf16_bits(forward(inputs, place, 0.5))[1]).tolist() == [i == 2 for i in range(8)]
    others = [0, 2]
    assert np.isfinite(got["do1"][others]).all() and np.isfinite(got["probs_grad"][others]).all()


def test_infinities_are_clamped(place):
    inputs, gate, up = pairs([np.inf, -np.inf, 1.0], [np.inf, -np.inf, 0.5])
    got = run_clamped(inputs, place, 2.0)
    testing.assert_swiglu_weighted_bwd(inputs, got, 2.0)
    finite = gate > -np.inf
    assert np.isfinite(from_bf16_bits(got["o2_s"])[0, finite]).all()


def test_extreme_values_are_within_the_bounds(place):
    values = [-3e38, -1e30, -1e4, -103.0, -88.0, -1.0, -1e-30, 0.0, 1e-30, 1.0, 88.0, 1e4, 1e30, 3e38]
    inputs, _, _ = pairs(values, values)
    for clamp_value in (1e-30, 0.5, 10.0, 1e4, 1e30):
        testing.assert_swiglu_weighted_bwd(inputs, run_clamped(inputs, place, clamp_value), clamp_value)
        testing.assert_swiglu_weighted(inputs, forward(inputs, place, clamp_value), clamp_value)


def test_the_clamp_is_rounded_to_fp32(place):
    # A double just below 2 that rounds to 2: a gate of 2 is at equality, not beyond.
    inputs, _, _ = pairs([2.0], [2.0])
    assert_same_bits(run_clamped(inputs, place, 2.0 - 2.0**-40), run_clamped(inputs, place, 2.0))
    assert (from_bf16_bits(run_clamped(inputs, place, 2.0 - 2.0**-40)["do1"]) != 0).all()


@pytest.mark.parametrize("kind", [k for k in testing.VIEW_KINDS if k not in ("contiguous", "broadcast_row")])
@pytest.mark.parametrize("name", SWIGLU_INPUTS)
def test_views(place, name, kind):
    inputs = testing.swiglu_weighted_inputs((3, 5), 16)
    assert_same_bits(run_clamped(inputs, place, 0.5, {name: kind}), run_clamped(inputs, place, 0.5))


@pytest.mark.parametrize("lead, width", [((0,), 8), ((4, 0), 8), ((4,), 0)])
def test_empty(place, lead, width):
    got = run_clamped(testing.swiglu_weighted_inputs(lead, width), place, 0.5)
    assert {n: a.shape for n, a in got.items()} == {"do1": (*lead, 2 * width), "probs_grad": lead, "o2_s": (*lead, width)}
    assert not got["probs_grad"].any()


# ---- Errors

BAD_CLAMPS = [*BAD_CLAMP_VALUES, (None, TypeError)]


@pytest.mark.parametrize("clamp_value, error", BAD_CLAMPS)
def test_wrong_clamp_value(place, clamp_value, error):
    tensors = tensors_of(testing.swiglu_weighted_inputs(4, 8), place)
    with pytest.raises(error, match=r"^fused_swiglu_weighted_clamp_bwd: clamp_value must be "):
        F.fused_swiglu_weighted_clamp_bwd(**tensors, clamp_value=clamp_value)


def test_a_tensor_is_no_clamp_value(place):
    tensors = tensors_of(testing.swiglu_weighted_inputs(4, 8), place)
    with pytest.raises(TypeError, match="clamp_value must be a float, but is Tensor"):
        F.fused_swiglu_weighted_clamp_bwd(**tensors, clamp_value=tensor_of(np.ones((), np.float32), place))


def test_clamp_value_has_to_be_there(place):
    with pytest.raises(TypeError):
        F.fused_swiglu_weighted_clamp_bwd(**tensors_of(testing.swiglu_weighted_inputs(4, 8), place))


@pytest.mark.parametrize("name, value, error", [
    *((name, 3, TypeError) for name in SWIGLU_INPUTS),
    ("o1", np.zeros((4, 15), np.uint16), ValueError),
    ("do2_s", np.zeros((4, 7), np.uint16), ValueError),
    ("unzipped_probs", np.zeros(3, np.float32), ValueError),
    ("o1", np.zeros((4, 16), np.float32), ValueError),
    ("unzipped_probs", np.zeros(4, np.uint16), ValueError),
])
def test_wrong_arguments(place, name, value, error):
    tensors = tensors_of(testing.swiglu_weighted_inputs(4, 8), place)
    tensors[name] = tensor_of(value, place) if isinstance(value, np.ndarray) else value
    with pytest.raises(error, match=rf"^fused_swiglu_weighted_clamp_bwd: {name} must "):
        F.fused_swiglu_weighted_clamp_bwd(**tensors, clamp_value=1.0)


def test_the_documented_backward_takes_no_clamp():
    import inspect

    parameters = list(inspect.signature(F.fused_swiglu_weighted_bwd).parameters)
    assert parameters == ["o1", "do2_s", "unzipped_probs", "name"]


# ---- In a program (test_graph_training.py has the forward and its gradient)


@pytest.mark.parametrize("clamp_value", [0.5, 1 / 3])
def test_program(place, clamp_value):
    inputs = testing.swiglu_weighted_inputs(6, 12)
    expected = run_clamped(inputs, place, clamp_value)
    device = paddle.CUDAPlace(0) if "gpu" in place else paddle.CPUPlace()
    paddle.enable_static()
    try:
        main = paddle.static.Program()
        with paddle.static.program_guard(main, paddle.static.Program()):
            shapes = {"o1": [-1, 24], "do2_s": [-1, 12], "unzipped_probs": [-1]}
            dtypes = {"unzipped_probs": "float32"}
            variables = {n: paddle.static.data(n, s, dtypes.get(n, "bfloat16")) for n, s in shapes.items()}
            for bad, error in BAD_CLAMPS:
                with pytest.raises(error, match=r"^fused_swiglu_weighted_clamp_bwd: clamp_value must be "):
                    F.fused_swiglu_weighted_clamp_bwd(**variables, clamp_value=bad)
            outputs = F.fused_swiglu_weighted_clamp_bwd(**variables, clamp_value=clamp_value, name="unused")
            assert all(variable.stop_gradient for variable in outputs)
            got = paddle.static.Executor(device).run(main, feed=inputs, fetch_list=list(outputs))
    finally:
        paddle.disable_static()
    assert_same_bits(dict(zip(OUTPUTS, got)), expected)
