"""Empty tensors give empty outputs, and sums of nothing are 0."""

import numpy as np
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import array_of, run_rmsnorm, run_swiglu, tensor_of, tensors_of
from paddle_gated_ops import testing
from paddle_gated_ops.testing import to_bf16_bits

LEADS = [(0,), (0, 5), (3, 0), (0, 0), (2, 0, 3)]


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("lead", LEADS)
def test_swiglu_without_rows(place, lead, column):
    inputs = testing.swiglu_weighted_inputs(lead, 16)
    if column:
        inputs["unzipped_probs"] = inputs["unzipped_probs"].reshape(lead + (1,))
    tensors = tensors_of(inputs, place)
    outputs = F.fused_swiglu_weighted_bwd(**tensors)
    for tensor, like in zip(outputs, ("o1", "unzipped_probs", "do2_s")):
        assert tensor.shape == list(inputs[like].shape)
        assert tensor.dtype == tensors[like].dtype
        assert str(tensor.place) == str(tensors["o1"].place)


@pytest.mark.parametrize("lead", [(4,), (2, 3), (0,), ()])
def test_swiglu_without_columns(place, lead):
    inputs = testing.swiglu_weighted_inputs(lead, 0)
    outputs = run_swiglu(inputs, place)
    assert outputs["do1"].shape == outputs["o2_s"].shape == lead + (0,)
    np.testing.assert_array_equal(outputs["probs_grad"], np.zeros(lead, np.float32))


@pytest.mark.parametrize("lead", LEADS)
def test_rmsnorm_without_rows(place, lead):
    tensors = tensors_of(testing.rmsnorm_silu_gate_inputs(lead), place)
    outputs = F.cake_rmsnorm_silu_gate_train_backward(**tensors)
    for tensor in outputs[:2]:
        assert tensor.shape == list(lead + (128,)) and tensor.dtype == tensors["x"].dtype
    for tensor in outputs:
        assert str(tensor.place) == str(tensors["x"].place)
    np.testing.assert_array_equal(array_of(outputs[2]), np.zeros(128, np.uint16))


@pytest.mark.parametrize("kind", ["contiguous", "offset", "step2", "reversed", "transposed"])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_rmsnorm_without_rows_into_grad_weight(place, dtype, kind):
    tensors = tensors_of(testing.rmsnorm_silu_gate_inputs(0), place)
    before = np.linspace(-3, 3, 128).astype(np.float32)
    before = to_bf16_bits(before) if dtype == np.uint16 else before

    grad_weight, base = testing.strided_view(before, kind, place)
    outputs = F.cake_rmsnorm_silu_gate_train_backward(**tensors, grad_weight=grad_weight, accumulate_grad_weight=True)
    assert outputs[2] is grad_weight
    np.testing.assert_array_equal(testing.read_view(grad_weight, base), before)

    outputs = F.cake_rmsnorm_silu_gate_train_backward(**tensors, grad_weight=grad_weight, compute_grad_weight=False)
    assert outputs[2] is None
    np.testing.assert_array_equal(testing.read_view(grad_weight, base), before)

    outputs = F.cake_rmsnorm_silu_gate_train_backward(**tensors, grad_weight=grad_weight)
    assert outputs[2] is grad_weight
    np.testing.assert_array_equal(testing.read_view(grad_weight, base), np.zeros(128, dtype))
    assert testing.damaged_canaries(grad_weight, base) == 0


def test_rmsnorm_empty_outputs_are_returned(place):
    inputs = testing.rmsnorm_silu_gate_inputs((3, 0))
    grad_x, grad_z = (tensor_of(np.zeros((3, 0, 128), np.uint16), place) for _ in range(2))
    workspace = tensor_of(np.full(10, 7, np.float32), place)
    options = dict(grad_x=grad_x, grad_z=grad_z, workspace=workspace)
    outputs = F.cake_rmsnorm_silu_gate_train_backward(**tensors_of(inputs, place), **options)
    assert outputs[0] is grad_x and outputs[1] is grad_z
    np.testing.assert_array_equal(array_of(workspace), np.full(10, 7, np.float32))


def test_shapes_are_checked_without_elements_too(place):
    inputs = testing.swiglu_weighted_inputs(0, 16)
    with pytest.raises(ValueError, match="unzipped_probs"):
        run_swiglu({**inputs, "unzipped_probs": np.zeros(4, np.float32)}, place)
    with pytest.raises(ValueError, match="do2_s"):
        run_swiglu({**inputs, "do2_s": np.zeros((0, 15), np.uint16)}, place)
    inputs = testing.rmsnorm_silu_gate_inputs(0)
    with pytest.raises(ValueError, match=r"\bx\b"):
        run_rmsnorm({**inputs, "x": np.zeros((0, 127), np.uint16)}, place)
    with pytest.raises(ValueError, match="weight"):
        run_rmsnorm({**inputs, "weight": np.zeros(0, np.uint16)}, place)


def test_calls_after_an_empty_one(place):
    run_swiglu(testing.swiglu_weighted_inputs(0, 16), place)
    run_rmsnorm(testing.rmsnorm_silu_gate_inputs(0), place)
    inputs = testing.swiglu_weighted_inputs(5, 16)
    testing.assert_swiglu_weighted_bwd(inputs, run_swiglu(inputs, place))
    inputs = testing.rmsnorm_silu_gate_inputs(5)
    testing.assert_rmsnorm_silu_gate_bwd(inputs, run_rmsnorm(inputs, place))
