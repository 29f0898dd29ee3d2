"""DistTensors take the registered op: the same results, and an error for what only an eager call can do.

Over two processes the rows stay sharded, and the weight's gradient is reduced in FP32.
"""

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
from processes import PROCESSES, assert_passed, collect, work

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


# ---- In two processes. Paddle's CPU build moves no BF16 tensor between placements: inputs are sharded in FP32 and then cast,
# and outputs are compared shard by shard.


def sharded(inputs, placement, names=None):
    """The arrays as DistTensors over both processes: those of ``names`` with the placement, the others replicated."""
    import paddle.distributed as dist

    mesh = dist.ProcessMesh(list(range(PROCESSES)), dim_names=["data"])
    tensors = {}
    for name, array in inputs.items():
        of_rows = name != "weight" if names is None else name in names
        values = testing.from_bf16_bits(array).astype("float32") if array.dtype == np.uint16 else array
        tensor = dist.shard_tensor(paddle.to_tensor(values), mesh, [placement if of_rows else dist.Replicate()])
        tensors[name] = (tensor.astype("bfloat16") if array.dtype == np.uint16 else tensor).detach()
    return tensors


def assert_sharded(outputs, expected, dim, rank):
    """Each of the DistTensors is sharded along dim, and has this process's part of the expected arrays."""
    for (name, array), tensor in zip(expected.items(), outputs):
        assert [placement.get_dim() for placement in tensor.placements if placement.is_shard()] == [dim], name
        part = np.ascontiguousarray(np.array_split(array, PROCESSES, axis=dim)[rank])
        assert_same_bits({name: array_of(tensor._local_value())}, {name: part})


def pick(outputs, *names):
    return {name: outputs[name] for name in names}


def assert_reduced_in_fp32(grad_weight, inputs, dim, **options):
    """The BF16 gradient is that of the parts' FP32 gradients, added in FP32 and rounded once; and not of BF16 parts."""
    assert grad_weight.placements[0].is_replicated() and "bfloat16" in str(grad_weight.dtype)
    parts = {}
    for dtype in (np.float32, np.uint16):
        total = np.zeros(128, np.float32)
        for rank in range(PROCESSES):
            part = {n: a if n == "weight" else np.array_split(a, PROCESSES, axis=dim)[rank] for n, a in inputs.items()}
            buffer = tensor_of(np.zeros(128, dtype), "cpu")
            array = run_rmsnorm(part, "cpu", grad_weight=buffer, **options)["grad_weight"]
            total += array if dtype == np.float32 else testing.from_bf16_bits(array).astype(np.float32)
        parts[dtype] = testing.to_bf16_bits(total)
    got = array_of(grad_weight._local_value())
    assert_same_bits({"grad_weight": got}, {"grad_weight": parts[np.float32]})
    assert np.any(parts[np.uint16] != got)


LEADING = [(6, 4), 0], [(6, 4), 1], [(6,), 0]


def check_swiglu_keeps_rows_sharded(rank):
    import paddle.distributed as dist

    for rows, dim in LEADING:
        inputs = testing.swiglu_weighted_inputs(rows, 12)
        outputs = F.fused_swiglu_weighted_bwd(**sharded(inputs, dist.Shard(dim)))
        assert_sharded(outputs, run_swiglu(inputs, "cpu"), dim, rank)
        del inputs["do2_s"]
        expected = array_of(F.fused_swiglu_weighted(**tensors_of(inputs, "cpu")))
        assert_sharded([F.fused_swiglu_weighted(**sharded(inputs, dist.Shard(dim)))], {"o2_s": expected}, dim, rank)


def check_swiglu_shards_replicated_probabilities(rank):
    import paddle.distributed as dist

    inputs = testing.swiglu_weighted_inputs((6, 4), 12)
    outputs = F.fused_swiglu_weighted_bwd(**sharded(inputs, dist.Shard(1), ["o1", "do2_s"]))
    assert_sharded(outputs, run_swiglu(inputs, "cpu"), 1, rank)


def check_swiglu_gradients(rank):
    import paddle.distributed as dist

    inputs = testing.swiglu_weighted_inputs((6, 4), 12)
    tensors = sharded(inputs, dist.Shard(0))
    do2_s = tensors.pop("do2_s")
    for tensor in tensors.values():
        tensor.stop_gradient = False
    paddle.autograd.backward([F.fused_swiglu_weighted(**tensors)], [do2_s])
    gradients = [tensors["o1"].grad, tensors["unzipped_probs"].grad]
    assert_sharded(gradients, pick(run_swiglu(inputs, "cpu"), "do1", "probs_grad"), 0, rank)


def check_rmsnorm_keeps_rows_sharded(rank):
    import paddle.distributed as dist

    for rows, dim in LEADING:
        inputs = testing.rmsnorm_silu_gate_inputs(rows)
        *outputs, grad_weight = F.cake_rmsnorm_silu_gate_train_backward(**sharded(inputs, dist.Shard(dim)), eps=1e-5)
        assert_sharded(outputs, pick(run_rmsnorm(inputs, "cpu", eps=1e-5), "grad_x", "grad_z"), dim, rank)
        assert grad_weight.stop_gradient
        assert_reduced_in_fp32(grad_weight, inputs, dim, eps=1e-5)
        outputs = F.cake_rmsnorm_silu_gate_train_backward(
            **sharded(inputs, dist.Shard(dim)), eps=1e-5, compute_grad_weight=False
        )
        assert outputs[2] is None
        assert_sharded(outputs, pick(run_rmsnorm(inputs, "cpu", eps=1e-5), "grad_x", "grad_z"), dim, rank)
        del inputs["grad_out"]
        expected = array_of(F.cake_rmsnorm_silu_gate(**tensors_of(inputs, "cpu")))
        assert_sharded([F.cake_rmsnorm_silu_gate(**sharded(inputs, dist.Shard(dim)))], {"y": expected}, dim, rank)


def check_rmsnorm_gradients(rank):
    import paddle.distributed as dist

    inputs = testing.rmsnorm_silu_gate_inputs((6, 4))
    tensors = sharded(inputs, dist.Shard(0))
    grad_out = tensors.pop("grad_out")
    for tensor in tensors.values():
        tensor.stop_gradient = False
    paddle.autograd.backward([F.cake_rmsnorm_silu_gate(**tensors)], [grad_out])
    expected = pick(run_rmsnorm(inputs, "cpu"), "grad_x", "grad_z")
    assert_sharded([tensors["x"].grad, tensors["z"].grad], expected, 0, rank)
    assert_reduced_in_fp32(tensors["weight"].grad, inputs, 0)


def check_replicated_rows_have_the_gradient_of_one_process(rank):
    import paddle.distributed as dist

    inputs = testing.rmsnorm_silu_gate_inputs(5)
    outputs = F.cake_rmsnorm_silu_gate_train_backward(**sharded(inputs, dist.Replicate()))
    assert_same_bits(local(outputs, ("grad_x", "grad_z", "grad_weight")), run_rmsnorm(inputs, "cpu"))


CHECKS = collect(globals())


@pytest.mark.parametrize("name", CHECKS)
def test_in_two_processes(name):
    assert_passed(__file__, name)


if __name__ == "__main__":
    work(CHECKS)
