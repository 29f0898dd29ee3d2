"""The size of a workspace: a multiple of 4 bytes that never falls as rows grow, for each place the ops run on."""

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import tensor_of, tensors_of
from paddle_gated_ops import testing

bytes_for = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes

without_gpu = pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="needs a CPU build of Paddle")


def test_multiple_of_4_and_never_falling(place):
    rows = [*range(10000), *(2**k + d for k in range(10, 63) for d in (-1, 0, 1)), 2**63 - 1]
    sizes = [bytes_for(n, place) for n in sorted(rows)]
    assert all(isinstance(size, int) and size >= 0 and size % 4 == 0 for size in sizes)
    assert sizes == sorted(sizes)
    assert sizes[-1] < 2**24  # bounded, however many rows


@pytest.mark.parametrize("rows", [1, 16, 17, 100, 6000, 20000])
def test_one_float_less_is_too_small(place, rows):
    tensors = tensors_of(testing.rmsnorm_silu_gate_inputs(rows), place)
    floats = bytes_for(rows, place) // 4
    F.cake_rmsnorm_silu_gate_train_backward(**tensors, workspace=tensor_of(np.zeros(floats), place))
    with pytest.raises(ValueError, match=rf"workspace.*\b{4 * floats}\b.*\b{4 * floats - 4}\b"):
        F.cake_rmsnorm_silu_gate_train_backward(**tensors, workspace=tensor_of(np.zeros(floats - 1), place))


def test_places():
    on_cpu = bytes_for(1000, "cpu")
    assert bytes_for(1000, paddle.CPUPlace()) == bytes_for(rows=1000, place="cpu") == on_cpu
    assert bytes_for(1000, tensor_of(np.zeros(1), "cpu").place) == on_cpu
    assert bytes_for(np.int64(1000), "cpu") == on_cpu


def test_current_place(place):
    assert bytes_for(1000) == bytes_for(1000, None) == bytes_for(1000, place)


@pytest.mark.gpu
def test_gpu_places():
    on_gpu = bytes_for(1000, "gpu:0")
    assert bytes_for(1000, "gpu") == bytes_for(1000, paddle.CUDAPlace(0)) == on_gpu
    assert bytes_for(1000, tensor_of(np.zeros(1), "gpu:0").place) == on_gpu


@without_gpu
@pytest.mark.parametrize("place", ["gpu", "gpu:0"])
def test_gpu_place_in_a_cpu_build(place):
    with pytest.raises(ValueError, match="place"):
        bytes_for(1, place)


@pytest.mark.parametrize("place", ["", "cpu:0", "CPU", "gpu:", "gpu:x", "gpu:-1", "xpu", "gpu_pinned", "npu:0"])
def test_bad_place_names(place):
    with pytest.raises(ValueError, match="place"):
        bytes_for(1, place)


@pytest.mark.gpu
def test_pinned_place():
    with pytest.raises(ValueError, match="place"):
        bytes_for(1, paddle.CUDAPinnedPlace())


@pytest.mark.parametrize("place", [0, 1.5, True, b"cpu", ["cpu"], object()])
def test_no_place(place):
    with pytest.raises(TypeError, match="place"):
        bytes_for(1, place)


@pytest.mark.parametrize("rows", [None, "3", 3.0, True, [3], np.float32(3)])
def test_rows_of_another_type(rows):
    with pytest.raises(TypeError, match="rows"):
        bytes_for(rows)


@pytest.mark.parametrize("rows", [-1, -(2**40), 2**63, 2**80])
def test_rows_out_of_range(rows):
    with pytest.raises(ValueError, match="rows"):
        bytes_for(rows)
