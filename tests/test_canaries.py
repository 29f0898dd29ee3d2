"""Canaries round every output and the workspace, for every alignment and tail: not an element outside is written."""

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import array_of, assert_same_bits, raw, run_rmsnorm, run_swiglu, tensor_of, tensors_of
from paddle_gated_ops import testing

CANARY = {np.uint16: 0x7F5A, np.float32: np.float32(-1.5e30)}
GUARD = 16  # elements before and after
OFFSETS = range(9)  # of BF16: each place between two 16-byte boundaries


class Guarded:
    """An output of the array's shape, ``offset`` elements past a boundary, in a buffer of canaries."""

    def __init__(self, like, offset, place):
        self.size, self.first = like.size, GUARD + offset
        self.before = np.full(like.size + 2 * GUARD + offset, CANARY[like.dtype.type], like.dtype)
        self.base = tensor_of(self.before, place)
        self.tensor = paddle.reshape(self.base[self.first : self.first + self.size], list(like.shape))

    def contents(self):
        """What was written, once the canaries have been found unharmed."""
        now = array_of(self.base)
        inside = slice(self.first, self.first + self.size)
        outside = np.ones(now.size, bool)
        outside[inside] = False
        np.testing.assert_array_equal(raw(now)[outside], raw(self.before)[outside])
        return now[inside].reshape(self.tensor.shape)


def shifted(array, offset, place):
    """A tensor of the array that begins ``offset`` elements past a boundary."""
    base = tensor_of(np.concatenate([np.zeros(offset, array.dtype), array.ravel()]), place)
    return paddle.reshape(base[offset:], list(array.shape))


@pytest.mark.parametrize("width", [*range(1, 26), 31, 33, 127, 128, 129, 255, 257, 1023, 2049])
def test_swiglu(place, width):
    inputs = testing.swiglu_weighted_inputs(3, width, seed=width)
    expected = run_swiglu(inputs, place)
    for offset in OFFSETS:
        # Another alignment for each, and for the inputs.
        outputs = {n: Guarded(array, (offset + i) % 9, place) for i, (n, array) in enumerate(expected.items())}
        tensors = {n: shifted(array, (offset + 3 * i) % 9, place) for i, (n, array) in enumerate(inputs.items())}
        F.fused_swiglu_weighted_bwd_out(**tensors, **{name: guarded.tensor for name, guarded in outputs.items()})
        assert_same_bits({name: guarded.contents() for name, guarded in outputs.items()}, expected)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100])
def test_rmsnorm(place, rows, dtype):
    inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=rows)
    grad_weight = tensor_of(np.zeros(128, dtype), place)
    expected = run_rmsnorm(inputs, place, grad_weight=grad_weight)
    floats = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows, place) // 4
    tensors = tensors_of(inputs, place)
    for offset in OFFSETS:
        outputs = {n: Guarded(array, (offset + i) % 9, place) for i, (n, array) in enumerate(expected.items())}
        workspace = Guarded(np.zeros(floats, np.float32), offset, place)
        given = {name: guarded.tensor for name, guarded in outputs.items()}
        F.cake_rmsnorm_silu_gate_train_backward(**tensors, **given, workspace=workspace.tensor)
        assert_same_bits({name: guarded.contents() for name, guarded in outputs.items()}, expected)
        workspace.contents()


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100])
def test_train_forward(place, rows):
    tensors = tensors_of(testing.rmsnorm_silu_gate_inputs(rows, seed=rows), place)
    tensors.pop("grad_out")
    expected = array_of(F.cake_rmsnorm_silu_gate_train_forward(**tensors))
    for offset in OFFSETS:
        out = Guarded(expected, offset, place)
        F.cake_rmsnorm_silu_gate_train_forward(**tensors, out=out.tensor)
        np.testing.assert_array_equal(out.contents(), expected)
