"""DistTensors take the registered op: the same results, and an error for what only an eager call can do."""

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import (
    RMSNORM_INPUTS,
    SWIGLU_INPUTS,
    array_of,
    assert_same_bits,
    run_rmsnorm,
    run_swiglu,
    tensor_of,
    tensors_of,
)
from paddle_gated_ops import testing

pytestmark = pytest.mark.skipif(int(paddle.__version__.split(".")[0]) < 3, reason="needs Paddle 3")


def distributed(tensors, names=None):
    """The tensors, those of ``names`` as DistTensors over a mesh of one process."""
    import paddle.distributed as dist

    mesh = dist.ProcessMesh([0], dim_names=["data"])
    names = tensors if names is None else names
    return {
        name: dist.shard_tensor(tensor, mesh, [dist.Replicate()]) if name in names else tensor
        for name, tensor in tensors.items()
    }


def local(outputs, names):
    return {n: None if t is None else array_of(t._local_value() if t.is_dist() else t) for n, t in zip(names, outputs)}


@pytest.mark.parametrize("names", [None, *([name] for name in SWIGLU_INPUTS)])
def test_swiglu(names):
    inputs = testing.swiglu_weighted_inputs(5, 12)
    outputs = F.fused_swiglu_weighted_bwd(**distributed(tensors_of(inputs, "cpu"), names))
    assert all(tensor.is_dist() and tensor.stop_gradient for tensor in outputs)
    assert_same_bits(local(outputs, ("do1", "probs_grad", "o2_s")), run_swiglu(inputs, "cpu"))


@pytest.mark.parametrize("compute", [True, False])
@pytest.mark.parametrize("names", [None, *([name] for name in RMSNORM_INPUTS)])
def test_rmsnorm(names, compute):
    inputs = testing.rmsnorm_silu_gate_inputs(5)
    tensors = distributed(tensors_of(inputs, "cpu"), names)
    outputs = F.cake_rmsnorm_silu_gate_train_backward(**tensors, eps=1e-5, compute_grad_weight=compute)
    got = local(outputs, ("grad_x", "grad_z", "grad_weight"))
    assert_same_bits(got, run_rmsnorm(inputs, "cpu", eps=1e-5, compute_grad_weight=compute))


BUFFERS = {
    "grad_x": np.zeros((5, 128), np.uint16),
    "grad_z": np.zeros((5, 128), np.uint16),
    "grad_weight": np.zeros(128, np.uint16),
    "workspace": np.zeros(1 << 16, np.float32),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_are_refused(name):
    tensors = distributed(tensors_of(testing.rmsnorm_silu_gate_inputs(5), "cpu"))
    with pytest.raises(ValueError, match=rf": {name}\b"):
        F.cake_rmsnorm_silu_gate_train_backward(**tensors, **{name: tensor_of(BUFFERS[name], "cpu")})


@pytest.mark.parametrize("name, value, error", [
    ("eps", -1.0, ValueError),
    ("eps", "1e-6", TypeError),
    ("compute_grad_weight", 1, TypeError),
    ("accumulate_grad_weight", 1, TypeError),
    ("accumulate_grad_weight", True, ValueError),
])
def test_options_are_checked(name, value, error):
    tensors = distributed(tensors_of(testing.rmsnorm_silu_gate_inputs(5), "cpu"))
    with pytest.raises(error, match=rf": {name}\b"):
        F.cake_rmsnorm_silu_gate_train_backward(**tensors, **{name: value})


@pytest.mark.parametrize("name", ["o1", "do2_s", "unzipped_probs"])
def test_shapes_are_checked(name):
    tensors = tensors_of(testing.swiglu_weighted_inputs(5, 12), "cpu")
    tensors[name] = tensor_of(np.zeros((4, 23), np.uint16 if name != "unzipped_probs" else np.float32), "cpu")
    with pytest.raises(ValueError, match=rf": {name}\b"):
        F.fused_swiglu_weighted_bwd(**distributed(tensors))
