"""compute, accumulate, grad_weight and workspace in every combination, over memory full of NaN."""

import itertools

import numpy as np
import paddle
import pytest
from paddle.base import core

import paddle_gated_ops.incubate.nn.functional as F
from calls import array_of, raw, run_rmsnorm, tensor_of, tensors_of
from paddle_gated_ops import testing
from paddle_gated_ops.testing import to_bf16_bits


def workspace_floats(rows, place):
    return F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows, place) // 4


def nan_floats(size, place):
    return tensor_of(np.full(size, np.nan, np.float32), place)


COMBINATIONS = list(itertools.product([True, False], [True, False], [None, "bfloat16", "float32"], [True, False]))


@pytest.mark.parametrize("rows", [1, 16, 40, 9000])
@pytest.mark.parametrize("compute, accumulate, dtype, with_workspace", COMBINATIONS)
def test_flags(place, rows, compute, accumulate, dtype, with_workspace):
    inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=rows)
    # What is overwritten is NaN, what is added to is a number.
    before = np.linspace(-40, 40, 128).astype(np.float32) if accumulate else np.full(128, np.nan, np.float32)
    before = to_bf16_bits(before) if dtype == "bfloat16" else before
    grad_weight = None if dtype is None else tensor_of(before, place)
    workspace = nan_floats(workspace_floats(rows, place), place) if with_workspace else None
    grad_x, grad_z = (tensor_of(np.full((rows, 128), 0x7FC0, np.uint16), place) for _ in range(2))
    options = dict(
        compute_grad_weight=compute,
        accumulate_grad_weight=accumulate,
        grad_weight=grad_weight,
        workspace=workspace,
        grad_x=grad_x,
        grad_z=grad_z,
    )
    if accumulate and (dtype is None or not compute):
        with pytest.raises(ValueError, match="accumulate_grad_weight"):
            F.cake_rmsnorm_silu_gate_train_backward(**tensors_of(inputs, place), **options)
        assert (array_of(grad_x) == 0x7FC0).all() and (array_of(grad_z) == 0x7FC0).all()
        if grad_weight is not None:
            np.testing.assert_array_equal(array_of(grad_weight), before)
        return

    outputs = F.cake_rmsnorm_silu_gate_train_backward(**tensors_of(inputs, place), **options)
    assert outputs[0] is grad_x and outputs[1] is grad_z
    assert (outputs[2] is None) == (not compute)
    if not compute and grad_weight is not None:
        np.testing.assert_array_equal(raw(array_of(grad_weight)), raw(before))
    if compute and grad_weight is not None:
        assert outputs[2] is grad_weight
    if not compute and workspace is not None:
        assert np.isnan(array_of(workspace)).all()
    arrays = dict(zip(("grad_x", "grad_z", "grad_weight"), map(array_of, outputs)))
    testing.assert_rmsnorm_silu_gate_bwd(
        inputs, arrays, initial_grad_weight=before if accumulate else None, compute_grad_weight=compute
    )
    # The gradients of x and z do not depend on the rest.
    plain = run_rmsnorm(inputs, place)
    for name in ("grad_x", "grad_z"):
        np.testing.assert_array_equal(arrays[name], plain[name])
    if compute and dtype == "bfloat16" and not accumulate:
        np.testing.assert_array_equal(arrays["grad_weight"], plain["grad_weight"])


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_accumulation_adds_once_a_call(place, dtype):
    inputs = testing.rmsnorm_silu_gate_inputs(100, seed=1)
    tensors = tensors_of(inputs, place)
    grad_weight = tensor_of(np.zeros(128, dtype), place)
    for _ in range(3):
        before = array_of(grad_weight).copy()
        outputs = F.cake_rmsnorm_silu_gate_train_backward(
            **tensors, grad_weight=grad_weight, accumulate_grad_weight=True
        )
        arrays = dict(zip(("grad_x", "grad_z", "grad_weight"), map(array_of, outputs)))
        testing.assert_rmsnorm_silu_gate_bwd(inputs, arrays, initial_grad_weight=before)


def test_one_workspace_for_calls_of_any_size(place):
    workspace = nan_floats(workspace_floats(8192, place), place)
    for rows in (8192, 1, 33, 8192, 0, 8191):
        inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=rows)
        expected = run_rmsnorm(inputs, place)
        got = run_rmsnorm(inputs, place, workspace=workspace)
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array)


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("rows", [1, 17, 9000])
def test_workspace_of_exactly_the_bytes_at_any_float(place, rows, shift):
    # Two of the four beginnings are 4-byte, but not 8-byte aligned.
    inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=rows)
    floats = workspace_floats(rows, place)
    base = nan_floats(floats + 8, place)
    workspace = base[shift : shift + floats]
    assert workspace.data_ptr() % 8 == 4 * (shift % 2)
    got = run_rmsnorm(inputs, place, workspace=workspace)
    np.testing.assert_array_equal(got["grad_weight"], run_rmsnorm(inputs, place)["grad_weight"])
    after = array_of(base)
    assert np.isnan(after[:shift]).all() and np.isnan(after[shift + floats :]).all()


@pytest.mark.parametrize("shape", [lambda n: [n, 1], lambda n: [1, n], lambda n: [n // 2 + 1, 2], lambda n: [n + 100]])
def test_workspace_of_any_contiguous_shape(place, shape):
    inputs = testing.rmsnorm_silu_gate_inputs(40, seed=2)
    workspace = nan_floats(shape(workspace_floats(40, place)), place)
    got = run_rmsnorm(inputs, place, workspace=workspace)
    np.testing.assert_array_equal(got["grad_weight"], run_rmsnorm(inputs, place)["grad_weight"])


def peak_bytes(place):
    peak = core.device_memory_stat_peak_value if "gpu" in place else core.host_memory_stat_peak_value
    return peak("Allocated", 0)


def current_bytes(place):
    current = core.device_memory_stat_current_value if "gpu" in place else core.host_memory_stat_current_value
    return current("Allocated", 0)


def test_nothing_is_allocated_where_everything_is_passed(place):
    rows = 8192
    inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=3)
    tensors = tensors_of(inputs, place)
    tensors["grad_x"], tensors["grad_z"] = (tensor_of(np.zeros((rows, 128), np.uint16), place) for _ in range(2))
    tensors["grad_weight"] = tensor_of(np.zeros(128, np.uint16), place)
    floats = workspace_floats(rows, place)
    workspace = nan_floats(floats, place)
    # With memory up to the peak in use, any allocation raises the peak.
    filling = paddle.empty([peak_bytes(place) - current_bytes(place) + 1], "uint8")
    before = peak_bytes(place)
    F.cake_rmsnorm_silu_gate_train_backward(**tensors, workspace=workspace)
    assert peak_bytes(place) == before
    F.cake_rmsnorm_silu_gate_train_backward(**tensors)
    assert peak_bytes(place) >= before + 4 * floats  # so the measure sees a workspace
    del filling
