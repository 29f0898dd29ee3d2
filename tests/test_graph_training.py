"""Gradients through the forwards in static graphs have the bits of eager mode: append_backward, gradients, to_static.

The tests run in the IR that Paddle has by default; the last one runs them all in the other IR, where there is one.
"""

import os
import subprocess
import sys

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

import paddle_gated_ops.incubate.nn.functional as F
from calls import (
    EVERY_SUBSET,
    FORWARDS,
    array_of,
    assert_gradients,
    assert_same_bits,
    backward_into,
    clamped_forward,
    eager,
    rmsnorm_forward,
    swiglu_forward,
    tensor_of,
)
from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn.functional.rmsnorm_silu_gate import rmsnorm_silu_gate
from paddle_gated_ops.testing import from_bf16_bits, to_bf16_bits

PADDLE_3 = int(paddle.__version__.split(".")[0]) >= 3
FUNCTIONS = {"swiglu": swiglu_forward, "clamped": clamped_forward, "rmsnorm": rmsnorm_forward}


def fp32_weight_forward(x, z, weight):
    return rmsnorm_silu_gate(x, z, weight, 1e-5, cast_weight=True)


def _fp32_weight_arrays(rows, seed=0):
    arrays = testing.rmsnorm_silu_gate_inputs(rows, seed)
    return {**arrays, "weight": np.linspace(-1, 1, 128, dtype=np.float32)}  # no BF16 numbers


def _fp32_weight_gradients(tensors):
    tensors["weight"] = tensors["weight"].astype("bfloat16")
    return F.cake_rmsnorm_silu_gate_train_backward(**tensors, eps=1e-5, grad_weight=paddle.empty([128], "float32"))


# As RMSNormSiLUGate has it. On the CPU alone: its casts are Paddle's, whose GPU kernels do not run on every GPU.
FP32_WEIGHT = FORWARDS["rmsnorm"]._replace(
    function=fp32_weight_forward, arrays=_fp32_weight_arrays, backward=_fp32_weight_gradients
)


def pir():
    return PADDLE_3 and bool(paddle.get_flags("FLAGS_enable_pir_api")["FLAGS_enable_pir_api"])


def shape_of(array, name):
    return list(array.shape) if name == "weight" else [-1, *array.shape[1:]]


def data(arrays, wanted=()):
    """Variables of unknown row counts; those of ``wanted`` want a gradient."""
    variables = {}
    for name, array in arrays.items():
        dtype = "bfloat16" if array.dtype == np.uint16 else "float32"
        variables[name] = paddle.static.data(name, shape_of(array, name), dtype)
        variables[name].stop_gradient = name not in wanted
    return variables


def execute(place, program, feed, fetch):
    device = paddle.CUDAPlace(0) if "gpu" in place else paddle.CPUPlace()
    return paddle.static.Executor(device).run(program, feed=feed, fetch_list=fetch)


@pytest.mark.parametrize("name, wanted", EVERY_SUBSET)
def test_gradients_in_a_program(place, program, name, wanted):
    check_program(place, program, FORWARDS[name], wanted)


@pytest.mark.parametrize("wanted", FP32_WEIGHT.subsets())
def test_gradients_of_a_fp32_weight_in_a_program(program, wanted):
    check_program("cpu", program, FP32_WEIGHT, wanted)


def check_program(place, program, forward, wanted):
    variables = data(forward.arrays(3), wanted)
    output = forward.function(*(variables[n] for n in forward.inputs))
    assert not output.stop_gradient
    grads = paddle.static.gradients([output], [variables[n] for n in wanted], [variables[forward.output_grad]])
    for grad, like in zip(grads, wanted):
        assert grad.dtype == variables[like].dtype and list(grad.shape) == list(variables[like].shape)
    for rows in (5, 0, 1, 300):
        arrays = forward.arrays(rows, seed=rows)
        found = execute(place, program, arrays, [output, *grads])
        with eager():
            expected = {"output": forward.output(arrays, place), **forward.gradients(arrays, place)}
        assert_same_bits(dict(zip(("output", *wanted), found)), {n: expected[n] for n in ("output", *wanted)})


@pytest.mark.parametrize("name, wanted", EVERY_SUBSET)
def test_append_backward(program, name, wanted):
    # A loss in FP32 whose gradient is a power of two of what is fed: the casts to BF16 are exact.
    forward = FORWARDS[name]
    variables = data(forward.arrays(4), wanted)
    output = forward.function(*(variables[n] for n in forward.inputs))
    loss = paddle.mean(output.astype("float32") * variables[forward.output_grad].astype("float32"))
    pairs = paddle.static.append_backward(loss, parameter_list=[variables[n] for n in wanted])
    assert len(pairs) == len(wanted)
    arrays = forward.arrays(4)
    found = execute("cpu", program, arrays, [grad for _, grad in pairs])
    grad_out = arrays[forward.output_grad]
    assert grad_out.size & (grad_out.size - 1) == 0
    arrays[forward.output_grad] = to_bf16_bits(from_bf16_bits(grad_out) / grad_out.size)
    with eager():
        expected = forward.gradients(arrays, "cpu")
    assert_same_bits(dict(zip(wanted, found)), {n: expected[n] for n in wanted})


@pytest.mark.parametrize("name", FORWARDS)
def test_nothing_wanted(place, program, name):
    forward = FORWARDS[name]
    variables = data(forward.arrays(3))
    output = forward.function(*(variables[n] for n in forward.inputs))
    for rows in (5, 0, 300):
        arrays = forward.arrays(rows)
        found = execute(place, program, arrays, [output])
        with eager():
            assert_same_bits({"output": found[0]}, {"output": forward.output(arrays, place)})


def test_one_function_into_the_other(place, program):
    norm, swiglu = testing.rmsnorm_silu_gate_inputs(6), testing.swiglu_weighted_inputs(6, 128)
    arrays = {"o1": swiglu["o1"], "unzipped_probs": swiglu["unzipped_probs"], **{n: norm[n] for n in ("z", "weight")}}
    variables = data({**arrays, "grad_out": norm["grad_out"]}, ("o1", "weight"))

    def both(o1, unzipped_probs, z, weight, **_):
        return F.cake_rmsnorm_silu_gate(F.fused_swiglu_weighted(o1, unzipped_probs), z, weight)

    wanted = [variables["o1"], variables["weight"]]
    grads = paddle.static.gradients([both(**variables)], wanted, [variables["grad_out"]])
    found = execute(place, program, {**arrays, "grad_out": norm["grad_out"]}, grads)
    with eager():
        leaves = {name: tensor_of(array, place) for name, array in arrays.items()}
        leaves["o1"].stop_gradient = leaves["weight"].stop_gradient = False
        backward_into(both(**leaves), tensor_of(norm["grad_out"], place))
        for array, name in zip(found, ("o1", "weight")):
            np.testing.assert_array_equal(array, array_of(leaves[name].grad))


# ---- to_static


def specs(forward):
    arrays = {name: forward.arrays(3)[name] for name in forward.inputs}
    dtypes = {name: "bfloat16" if array.dtype == np.uint16 else "float32" for name, array in arrays.items()}
    return [InputSpec(shape_of(array, name), dtypes[name], name) for name, array in arrays.items()]


def check_static(place, forward, wanted, function, row_counts):
    for rows in row_counts:
        arrays = forward.arrays(rows, seed=rows)
        leaves = forward.leaves(arrays, place, wanted)
        output = function(*leaves.values())
        np.testing.assert_array_equal(array_of(output.detach()), forward.output(arrays, place))
        backward_into(output, tensor_of(arrays[forward.output_grad], place))
        assert_gradients(leaves, forward.gradients(arrays, place), wanted)


@pytest.mark.parametrize("with_spec", [True, False])
@pytest.mark.parametrize("name, wanted", EVERY_SUBSET)
def test_to_static(place, name, wanted, with_spec):
    options = {"input_spec": specs(FORWARDS[name])} if with_spec else {}
    function = paddle.jit.to_static(FUNCTIONS[name], full_graph=True, **options)
    check_static(place, FORWARDS[name], wanted, function, (5, 7, 0, 300))


@pytest.mark.parametrize("wanted", FP32_WEIGHT.subsets())
def test_a_fp32_weight_to_static(wanted):
    function = paddle.jit.to_static(fp32_weight_forward, full_graph=True, input_spec=specs(FP32_WEIGHT))
    check_static("cpu", FP32_WEIGHT, wanted, function, (5, 7, 0, 300))


@pytest.mark.parametrize("name, wanted", EVERY_SUBSET)
def test_to_static_by_bytecode(place, name, wanted):
    if PADDLE_3 and not pir():
        pytest.skip("Paddle 3 translates bytecode for PIR alone")
    check_static(place, FORWARDS[name], wanted, paddle.jit.to_static(FUNCTIONS[name], full_graph=False), (5, 7))


class Block(paddle.nn.Layer):
    """Both functions between casts, with an FP32 weight, as a model on the CPU has them."""

    def __init__(self):
        super().__init__()
        values = np.linspace(0.5, 1.5, 128).astype("float32")
        self.weight = self.create_parameter([128], default_initializer=paddle.nn.initializer.Assign(values))

    def forward(self, o1, probs, z):
        hidden = F.fused_swiglu_weighted(o1.astype("bfloat16"), probs, clamp_value=2.0)
        return F.cake_rmsnorm_silu_gate(hidden, z.astype("bfloat16"), self.weight.astype("bfloat16")).astype("float32")


@pytest.mark.parametrize("full_graph", [True, False])
def test_a_layer_to_static(full_graph):
    if PADDLE_3 and not pir() and not full_graph:
        pytest.skip("Paddle 3 translates bytecode for PIR alone")
    swiglu, norm = testing.swiglu_weighted_inputs(6, 128), testing.rmsnorm_silu_gate_inputs(6)

    def run(translate):
        paddle.set_device("cpu")
        layer = Block()
        function = paddle.jit.to_static(layer, full_graph=full_graph) if translate else layer
        leaves = [paddle.to_tensor(from_bf16_bits(a).astype("float32")) for a in (swiglu["o1"], norm["z"])]
        leaves.insert(1, tensor_of(swiglu["unzipped_probs"], "cpu"))
        for leaf in leaves:
            leaf.stop_gradient = False
        grad = paddle.to_tensor(from_bf16_bits(norm["grad_out"]).astype("float32"))
        backward_into(function(*leaves), grad)
        return [leaf.grad.numpy() for leaf in (*leaves, layer.weight)]

    for found, expected in zip(run(True), run(False)):
        np.testing.assert_array_equal(found, expected)


# ---- Errors


@pytest.mark.parametrize("clamp_value, error", [
    (0, ValueError),
    (-1.0, ValueError),
    (float("nan"), ValueError),
    (float("inf"), ValueError),
    (True, TypeError),
    ("7", TypeError),
])
def test_clamp_value_is_checked_when_it_is_built(program, clamp_value, error):
    variables = data(FORWARDS["swiglu"].arrays(3))
    before = str(program)
    with pytest.raises(error, match=r"^fused_swiglu_weighted: clamp_value must be "):
        F.fused_swiglu_weighted(variables["o1"], variables["unzipped_probs"], clamp_value)
    assert str(program) == before


@pytest.mark.parametrize("eps, error", [(-1.0, ValueError), (float("nan"), ValueError), ("1", TypeError), (None, TypeError)])
def test_eps_is_checked_when_it_is_built(program, eps, error):
    variables = data(FORWARDS["rmsnorm"].arrays(3))
    with pytest.raises(error, match=r"^cake_rmsnorm_silu_gate: eps must be "):
        F.cake_rmsnorm_silu_gate(variables["x"], variables["z"], variables["weight"], eps)


WRONG = [
    ("swiglu", "o1", [-1, 33], "bfloat16"),
    ("swiglu", "o1", [-1, 32], "float32"),
    ("swiglu", "unzipped_probs", [-1, 2], "float32"),
    ("swiglu", "unzipped_probs", [-1], "bfloat16"),
    ("rmsnorm", "x", [-1, 127], "bfloat16"),
    ("rmsnorm", "x", [-1, 128], "float32"),
    ("rmsnorm", "z", [-1, 127], "bfloat16"),
    ("rmsnorm", "weight", [127], "bfloat16"),
    ("rmsnorm", "weight", [128], "float32"),
]


@pytest.mark.parametrize("name, argument, shape, dtype", WRONG)
def test_variables_are_checked_when_it_is_built(program, name, argument, shape, dtype):
    forward = FORWARDS[name]
    variables = data(forward.arrays(3))
    variables[argument] = paddle.static.data("other", shape, dtype)
    before = str(program)
    with pytest.raises(ValueError, match=rf"^{forward.entry}: {argument} must have "):
        forward.function(*(variables[n] for n in forward.inputs))
    assert str(program) == before


@pytest.mark.parametrize("value", [None, 3, np.zeros((4, 128), np.float32)], ids=["None", "int", "array"])
@pytest.mark.parametrize("name, argument", [(n, a) for n in ("swiglu", "rmsnorm") for a in FORWARDS[n].inputs])
def test_no_variable(program, name, argument, value):
    forward = FORWARDS[name]
    variables = {**data(forward.arrays(3)), argument: value}
    with pytest.raises(TypeError, match=rf"^{forward.entry}: {argument} must be a variable"):
        forward.function(*(variables[n] for n in forward.inputs))


# ---- The other IR


@pytest.mark.skipif(not PADDLE_3, reason="Paddle 2.6 has the legacy IR alone")
@pytest.mark.skipif("FLAGS_enable_pir_api" in os.environ, reason="the IR is chosen from outside")
def test_all_of_this_in_the_legacy_ir():
    env = {**os.environ, "FLAGS_enable_pir_api": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    done = subprocess.run(
        [*command, os.path.abspath(__file__)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_ir_is_the_one_meant():
    assert pir() == (PADDLE_3 and os.environ.get("FLAGS_enable_pir_api") != "0")
