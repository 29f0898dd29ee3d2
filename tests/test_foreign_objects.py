"""What fuzzing has found: objects that ended the process in the place of a tensor, or were taken for one."""

import inspect

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import RMSNORM_INPUTS, SWIGLU_INPUTS, tensors_of
from fuzz.foreign import NO_DENSE_TENSORS, NO_TENSORS
from paddle_gated_ops import _amp, testing
from paddle_gated_ops.incubate.nn import RMSNormSiLUGate, WeightedSwiGLUExperts

FUNCTIONS = {name: getattr(F, name) for name in F.__all__ if not name.endswith("_workspace_bytes")}
ARGUMENTS = [
    (function, name)
    for function in FUNCTIONS
    for name in inspect.signature(FUNCTIONS[function]).parameters
    if name in SWIGLU_INPUTS + RMSNORM_INPUTS
]
# Tensor() is an empty tensor in Paddle 3, and right where one belongs.
WITHOUT_CONTENT = sorted({*NO_DENSE_TENSORS} - {"a tensor that never was anything"})


def arguments_of(function):
    arrays = {**testing.swiglu_weighted_inputs(5, 12), **testing.rmsnorm_silu_gate_inputs(5)}
    names = inspect.signature(FUNCTIONS[function]).parameters
    arguments = tensors_of({name: array for name, array in arrays.items() if name in names}, "cpu")
    return {**arguments, "clamp_value": 0.5} if "clamp" in function else arguments


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("amp", [None, "bfloat16"])
@pytest.mark.parametrize("what", ["a variable", "a variable of a deleted program"])
@pytest.mark.parametrize("function, name", ARGUMENTS)
def test_variable(monkeypatch, function, name, what, amp, trainable):
    monkeypatch.setattr(_amp, "autocast_dtype", lambda: amp)
    arguments = arguments_of(function)
    for tensor in arguments.values():
        if isinstance(tensor, paddle.Tensor):
            tensor.stop_gradient = not trainable
    arguments[name] = NO_TENSORS[what](np.ones((5, 12)))
    with pytest.raises(TypeError, match=rf"{function}: {name}\b"):
        FUNCTIONS[function](**arguments)


@pytest.mark.parametrize("what", ["a variable", "a variable of a deleted program"])
def test_variable_in_a_layer(what):
    tensor, variable = paddle.ones([5, 4]), NO_TENSORS[what](np.ones((5, 4)))
    layer = WeightedSwiGLUExperts(2, 4, 3)
    for tokens, probs, counts, name in (
        (variable, paddle.ones([5]), [2, 3], "tokens"),
        (tensor, variable, [2, 3], "unzipped_probs"),
        (tensor, paddle.ones([5]), variable, "tokens_per_expert"),
        (tensor, paddle.ones([5]), [variable] * 2, "tokens_per_expert"),
    ):
        with pytest.raises(TypeError, match=rf"WeightedSwiGLUExperts: {name}\b"):
            layer(tokens, probs, counts)
    x = paddle.ones([5, 128]).astype("bfloat16")
    for arguments, name in (((variable, x), "x"), ((x, variable), "z")):
        with pytest.raises(TypeError, match=rf": {name}\b"):
            RMSNormSiLUGate()(*arguments)


@pytest.mark.skipif(paddle.__version__.startswith("2."), reason="needs Paddle 3")
@pytest.mark.parametrize("what", WITHOUT_CONTENT)
@pytest.mark.parametrize("function, name", ARGUMENTS)
def test_no_dense_tensor_beside_dist_tensors(function, name, what):
    dist = paddle.distributed
    arguments = arguments_of(function)
    for other, tensor in arguments.items():
        if isinstance(tensor, paddle.Tensor):
            arguments[other] = dist.shard_tensor(tensor, dist.ProcessMesh([0], dim_names=["x"]), [dist.Replicate()])
    arguments[name] = NO_DENSE_TENSORS[what](np.ones((5, 12)))
    with pytest.raises(ValueError, match=rf"{function}: {name}\b"):
        FUNCTIONS[function](**arguments)


@pytest.mark.parametrize("what", WITHOUT_CONTENT)
@pytest.mark.parametrize("rows", [0, 5])
def test_no_dense_tensor_in_a_layer(rows, what):
    odd, counts = NO_DENSE_TENSORS[what](np.ones((rows, 4))), [0, rows]
    layer = WeightedSwiGLUExperts(2, 4, 3)
    with pytest.raises(ValueError, match=r"WeightedSwiGLUExperts: tokens\b"):
        layer(odd, paddle.ones([rows]), counts)
    with pytest.raises(ValueError, match=r"WeightedSwiGLUExperts: unzipped_probs\b"):
        layer(paddle.ones([rows, 4]), odd, counts)
    with pytest.raises(ValueError, match=r"WeightedSwiGLUExperts: tokens_per_expert\b"):
        layer(paddle.ones([rows, 4]), paddle.ones([rows]), odd)


@pytest.mark.parametrize("what", [np.ones(3), np.ones(3, int), np.ones((1, 1)), np.float32(1), int, np.int64, paddle.Tensor])
def test_counts_that_only_look_like_ints(what):
    with pytest.raises(TypeError, match=r"WeightedSwiGLUExperts: tokens_per_expert must be a list of ints"):
        WeightedSwiGLUExperts(2, 4, 3)(paddle.ones([5, 4]), paddle.ones([5]), [what, what])


def test_an_empty_tensor_of_counts():
    for counts in (paddle.empty([0], "int64"), paddle.to_tensor([], "int64"), paddle.empty([0, 2], "int64")):
        with pytest.raises(ValueError, match=r"WeightedSwiGLUExperts: tokens_per_expert\b"):
            WeightedSwiGLUExperts(2, 4, 3)(paddle.ones([5, 4]), paddle.ones([5]), counts)
