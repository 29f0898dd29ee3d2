"""auto_cast: where it acts with bfloat16, inputs are cast to what the functions take, and gradients come back as they went.

On the CPU Paddle's auto_cast acts never; the rule is tested by forcing the one helper that reads its state.
"""

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import (
    FORWARDS,
    RMSNORM_INPUTS,
    array_of,
    assert_same_bits,
    backward_into,
    clamped_forward,
    rmsnorm_forward,
    swiglu_forward,
    tensor_of,
)
from paddle_gated_ops import _amp, testing
from paddle_gated_ops.testing import from_bf16_bits, to_bf16_bits

CASTS = [("swiglu", "o1"), ("swiglu", "unzipped_probs"), ("clamped", "o1"), *(("rmsnorm", n) for n in ("x", "z", "weight"))]
FUNCTIONS = {"swiglu": swiglu_forward, "clamped": clamped_forward, "rmsnorm": rmsnorm_forward}


@pytest.fixture
def force(monkeypatch):
    def to(dtype):
        monkeypatch.setattr(_amp, "autocast_dtype", lambda: dtype)

    return to


def arrays_of(forward):
    """Inputs that both dtypes hold exactly: a cast rounds nothing (Paddle 2.6 truncates on the CPU)."""
    arrays = forward.arrays(6)
    if "unzipped_probs" in arrays:
        arrays["unzipped_probs"] = from_bf16_bits(to_bf16_bits(arrays["unzipped_probs"])).astype(np.float32)
    return arrays


def in_the_other_dtype(array):
    return from_bf16_bits(array).astype(np.float32) if array.dtype == np.uint16 else to_bf16_bits(array)


def unrounded_grad_weight(arrays):
    tensors = [tensor_of(arrays[name], "cpu") for name in RMSNORM_INPUTS]
    grad_weight = tensor_of(np.zeros(128, np.float32), "cpu")
    F.cake_rmsnorm_silu_gate_train_backward(*tensors, 1e-5, grad_weight=grad_weight)
    return array_of(grad_weight)


def check(forward, function, arrays, others):
    """Runs a function with some inputs in the other dtype; gradients have the caller's dtypes."""
    given = {n: in_the_other_dtype(arrays[n]) if n in others else arrays[n] for n in forward.inputs}
    leaves = {name: tensor_of(array, "cpu") for name, array in given.items()}
    for leaf in leaves.values():
        leaf.stop_gradient = False
    output = function(*leaves.values())
    assert "bfloat16" in str(output.dtype).lower() or "BF16" in str(output.dtype)
    backward_into(output, tensor_of(arrays[forward.output_grad], "cpu"))
    np.testing.assert_array_equal(array_of(output.detach()), forward.output(arrays, "cpu"))
    for name, expected in forward.gradients(arrays, "cpu").items():
        grad = leaves[name].grad
        assert grad.dtype == leaves[name].dtype, name
        if name == "weight" and name in others:
            assert_same_bits({name: array_of(grad)}, {name: unrounded_grad_weight(arrays)})
        elif name not in others:
            assert_same_bits({name: array_of(grad)}, {name: expected})
        elif expected.dtype == np.uint16:
            np.testing.assert_array_equal(array_of(grad), from_bf16_bits(expected).astype(np.float32))
        else:  # FP32 to BF16 is a rounding, and in 2.6 a truncation
            error = np.abs(from_bf16_bits(array_of(grad)) - expected)
            assert (error <= testing.bf16_ulp(expected)).all()


@pytest.mark.parametrize("name, other", CASTS)
def test_one_input_is_cast(force, name, other):
    force("bfloat16")
    check(FORWARDS[name], FUNCTIONS[name], arrays_of(FORWARDS[name]), {other})


@pytest.mark.parametrize("name", FORWARDS)
def test_all_inputs_are_cast(force, name):
    force("bfloat16")
    check(FORWARDS[name], FUNCTIONS[name], arrays_of(FORWARDS[name]), set(FORWARDS[name].inputs))


@pytest.mark.parametrize("name", FORWARDS)
def test_nothing_is_cast_that_is_right(force, name):
    force("bfloat16")
    check(FORWARDS[name], FUNCTIONS[name], arrays_of(FORWARDS[name]), set())


@pytest.mark.parametrize("name", FORWARDS)
def test_to_static(force, name):
    force("bfloat16")
    function = paddle.jit.to_static(FUNCTIONS[name], full_graph=True)
    check(FORWARDS[name], function, arrays_of(FORWARDS[name]), set(FORWARDS[name].inputs))


def test_main_grad_of_a_fp32_weight(force):
    force("bfloat16")
    arrays = arrays_of(FORWARDS["rmsnorm"])
    values = from_bf16_bits(arrays["weight"]).astype(np.float32)
    paddle.set_device("cpu")
    weight = paddle.create_parameter([128], "float32", default_initializer=paddle.nn.initializer.Assign(values))
    weight.main_grad = main_grad = tensor_of(np.zeros(128, np.float32), "cpu")
    x, z = (tensor_of(in_the_other_dtype(arrays[name]), "cpu") for name in ("x", "z"))
    backward_into(rmsnorm_forward(x, z, weight), tensor_of(arrays["grad_out"], "cpu"))
    assert weight.grad is None and weight.main_grad is main_grad
    assert_same_bits({"main_grad": array_of(main_grad)}, {"main_grad": unrounded_grad_weight(arrays)})


@pytest.mark.parametrize("name", FORWARDS)
def test_float16_is_refused(force, name):
    force("float16")
    forward = FORWARDS[name]
    leaves = forward.leaves(arrays_of(forward), "cpu")
    message = rf"^{forward.entry}: auto_cast must be with dtype='bfloat16', but is with 'float16'"
    with pytest.raises(ValueError, match=message):
        forward.function(**leaves)


@pytest.mark.parametrize("name, other", CASTS)
def test_without_auto_cast_nothing_is_cast(name, other):
    forward = FORWARDS[name]
    arrays = arrays_of(forward)
    leaves = forward.leaves({**arrays, other: in_the_other_dtype(arrays[other])}, "cpu")
    with pytest.raises(ValueError, match=rf"^{forward.entry}: {other} must have dtype "):
        forward.function(**leaves)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
@pytest.mark.parametrize("name, other", CASTS)
def test_other_dtypes_are_not_cast(force, name, other, dtype):
    force("bfloat16")
    forward = FORWARDS[name]
    leaves = forward.leaves(arrays_of(forward), "cpu", ())
    leaves[other] = paddle.to_tensor(np.zeros(leaves[other].shape, dtype), place="cpu")
    with pytest.raises(ValueError, match=rf"^{forward.entry}: {other} must have dtype .*{dtype}"):
        forward.function(**leaves)


@pytest.mark.parametrize("value", [None, 3, np.zeros((6, 128), np.float32)], ids=["None", "int", "array"])
@pytest.mark.parametrize("name, other", CASTS)
def test_no_tensors_are_not_cast(force, name, other, value):
    force("bfloat16")
    forward = FORWARDS[name]
    leaves = {**forward.leaves(arrays_of(forward), "cpu"), other: value}
    with pytest.raises(TypeError, match=rf"^{forward.entry}: {other} must be a paddle.Tensor"):
        forward.function(**leaves)


# ---- The helper


def test_it_reads_the_state_that_auto_cast_sets():
    from paddle.base import core
    from paddle.base.framework import _dygraph_tracer

    tracer = _dygraph_tracer()
    before = tracer._amp_level, tracer._amp_dtype
    assert _amp.autocast_dtype() is None
    try:
        for level in (core.AmpLevel.O1, core.AmpLevel.O2):
            for dtype in ("bfloat16", "float16"):
                tracer._amp_level, tracer._amp_dtype = level, dtype
                assert _amp.autocast_dtype() == dtype
        tracer._amp_level = core.AmpLevel.O0
        assert _amp.autocast_dtype() is None
    finally:
        tracer._amp_level, tracer._amp_dtype = before


@pytest.mark.skipif(int(paddle.__version__.split(".")[0]) < 3, reason="Paddle 2.6 has no PIR")
def test_it_reads_the_state_of_a_program():
    from paddle.base import core
    from paddle.base.framework import in_pir_mode

    paddle.enable_static()
    attributes = core._get_amp_attrs()
    before = attributes._amp_level, attributes._amp_dtype
    try:
        if not in_pir_mode():
            pytest.skip("needs PIR")
        assert _amp.autocast_dtype() is None
        attributes._amp_level, attributes._amp_dtype = core.AmpLevel.O1, "bfloat16"
        assert _amp.autocast_dtype() == "bfloat16"
    finally:
        attributes._amp_level, attributes._amp_dtype = before
        paddle.disable_static()


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.filterwarnings("ignore")
def test_auto_cast_on_the_cpu(name):
    forward = FORWARDS[name]
    arrays = arrays_of(forward)
    other = forward.inputs[0]
    wrong = forward.leaves({**arrays, other: in_the_other_dtype(arrays[other])}, "cpu")
    paddle.set_device("cpu")
    with paddle.amp.auto_cast(dtype="bfloat16"):
        if _amp.autocast_dtype() is None:  # else this Paddle casts on the CPU as well, and so do the functions
            with pytest.raises(ValueError, match=rf"{other} must have dtype"):
                forward.function(**wrong)
        output = forward.function(**forward.leaves(arrays, "cpu"))
    np.testing.assert_array_equal(array_of(output.detach()), forward.output(arrays, "cpu"))
