"""Static graphs, PIR and legacy: in a program that an Executor runs and in to_static, with unknown dimensions.

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
from calls import RMSNORM_INPUTS, SWIGLU_INPUTS, array_of, assert_same_bits, eager, run_rmsnorm, run_swiglu, tensors_of
from paddle_gated_ops import testing

WIDTH = 12
ROW_COUNTS = (5, 0, 7, 1, 300)
SWIGLU_SHAPES = {"o1": [-1, 2 * WIDTH], "do2_s": [-1, WIDTH], "unzipped_probs": [-1]}
RMSNORM_SHAPES = {"grad_out": [-1, 128], "x": [-1, 128], "z": [-1, 128], "weight": [128]}
SWIGLU_OUTPUTS = ("do1", "probs_grad", "o2_s")
RMSNORM_OUTPUTS = ("grad_x", "grad_z", "grad_weight")


def pir():
    return bool(paddle.get_flags("FLAGS_enable_pir_api")["FLAGS_enable_pir_api"]) if pir_exists() else False


def pir_exists():
    return int(paddle.__version__.split(".")[0]) >= 3


def dtype_of(name):
    return "float32" if name == "unzipped_probs" else "bfloat16"


def data(shapes):
    return {name: paddle.static.data(name, shape, dtype_of(name)) for name, shape in shapes.items()}


def execute(place, program, inputs, outputs):
    """What an Executor computes for arrays; inputs and outputs by name."""
    device = paddle.CUDAPlace(0) if "gpu" in place else paddle.CPUPlace()
    names = [name for name, variable in outputs.items() if variable is not None]
    feed = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
    fetched = paddle.static.Executor(device).run(program, feed=feed, fetch_list=[outputs[name] for name in names])
    return {**dict.fromkeys(outputs), **dict(zip(names, fetched))}


def expect(run, inputs, place, **options):
    with eager():
        return run(inputs, place, **options)


@pytest.mark.parametrize("shapes, lead", [
    (SWIGLU_SHAPES, lambda n: (n,)),
    ({"o1": [-1, 2 * WIDTH], "do2_s": [-1, WIDTH], "unzipped_probs": [-1, 1]}, lambda n: (n,)),
    ({"o1": [-1, -1, 2 * WIDTH], "do2_s": [-1, -1, WIDTH], "unzipped_probs": [-1, -1]}, lambda n: (n, 3)),
    ({"o1": [-1, -1], "do2_s": [-1, -1], "unzipped_probs": [-1]}, lambda n: (n,)),
], ids=["rows", "probs as a column", "rank 3", "nothing known"])
def test_swiglu_program(place, program, shapes, lead):
    variables = data(shapes)
    outputs = dict(zip(SWIGLU_OUTPUTS, F.fused_swiglu_weighted_bwd(**variables, name="unused")))
    for name, like in zip(SWIGLU_OUTPUTS, SWIGLU_INPUTS):
        like = {"do1": "o1", "probs_grad": "unzipped_probs", "o2_s": "do2_s"}[name]
        assert list(outputs[name].shape) == shapes[like]
        assert outputs[name].dtype == variables[like].dtype
        assert outputs[name].stop_gradient
    for rows in ROW_COUNTS:
        inputs = testing.swiglu_weighted_inputs(lead(rows), WIDTH, seed=rows)
        if len(shapes["unzipped_probs"]) == len(shapes["o1"]):
            inputs["unzipped_probs"] = inputs["unzipped_probs"].reshape(lead(rows) + (1,))
        got = execute(place, program, inputs, outputs)
        assert_same_bits(got, expect(run_swiglu, inputs, place))


@pytest.mark.parametrize("compute", [True, False])
@pytest.mark.parametrize("shape, lead", [([-1, 128], lambda n: (n,)), ([-1, 4, 128], lambda n: (n, 4))])
def test_rmsnorm_program(place, program, shape, lead, compute):
    shapes = {name: [128] if name == "weight" else shape for name in RMSNORM_INPUTS}
    variables = data(shapes)
    outputs = F.cake_rmsnorm_silu_gate_train_backward(**variables, compute_grad_weight=compute)
    assert (outputs[2] is None) == (not compute)
    outputs = dict(zip(RMSNORM_OUTPUTS, outputs))
    for variable, like in zip(outputs.values(), ("x", "z", "weight")):
        if variable is not None:
            assert list(variable.shape) == shapes[like] and variable.dtype == variables[like].dtype
            assert variable.stop_gradient
    for rows in ROW_COUNTS:
        inputs = testing.rmsnorm_silu_gate_inputs(lead(rows), seed=rows)
        got = execute(place, program, inputs, outputs)
        assert_same_bits(got, expect(run_rmsnorm, inputs, place, compute_grad_weight=compute))


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 0.1, 1 / 3, 1])
def test_eps_is_the_same_number_as_in_eager_mode(place, program, eps):
    outputs = dict(zip(RMSNORM_OUTPUTS, F.cake_rmsnorm_silu_gate_train_backward(**data(RMSNORM_SHAPES), eps=eps)))
    inputs = testing.rmsnorm_silu_gate_inputs(50)
    assert_same_bits(execute(place, program, inputs, outputs), expect(run_rmsnorm, inputs, place, eps=eps))


def test_both_ops_in_one_program_twice(place, program):
    swiglu, rmsnorm = data(SWIGLU_SHAPES), data(RMSNORM_SHAPES)
    outputs = {}
    for i in range(2):
        outputs.update(zip([f"{n}{i}" for n in SWIGLU_OUTPUTS], F.fused_swiglu_weighted_bwd(**swiglu)))
        results = F.cake_rmsnorm_silu_gate_train_backward(**rmsnorm, eps=10.0**-i)
        outputs.update(zip([f"{n}{i}" for n in RMSNORM_OUTPUTS], results))
    inputs = testing.swiglu_weighted_inputs(6, WIDTH), testing.rmsnorm_silu_gate_inputs(9)
    got = execute(place, program, {**inputs[0], **inputs[1]}, outputs)
    for i in range(2):
        expected = expect(run_swiglu, inputs[0], place)
        assert_same_bits({n: got[f"{n}{i}"] for n in SWIGLU_OUTPUTS}, expected)
        expected = expect(run_rmsnorm, inputs[1], place, eps=10.0**-i)
        assert_same_bits({n: got[f"{n}{i}"] for n in RMSNORM_OUTPUTS}, expected)


def test_one_op_after_the_other(place, program):
    # The gradient of one is the input of the other: results that stay in the graph.
    variables = data({"o1": [-1, 256], "do2_s": [-1, 128], "unzipped_probs": [-1], "x": [-1, 128], "weight": [128]})
    _, _, o2_s = F.fused_swiglu_weighted_bwd(variables["o1"], variables["do2_s"], variables["unzipped_probs"])
    x, weight = variables["x"], variables["weight"]
    outputs = dict(zip(RMSNORM_OUTPUTS, F.cake_rmsnorm_silu_gate_train_backward(o2_s, x, x, weight)))
    for rows in (3, 8):
        first, second = testing.swiglu_weighted_inputs(rows, 128), testing.rmsnorm_silu_gate_inputs(rows)
        inputs = {**first, "x": second["x"], "weight": second["weight"]}
        got = execute(place, program, inputs, outputs)
        middle = expect(run_swiglu, first, place)["o2_s"]
        whole = {"grad_out": middle, "x": second["x"], "z": second["x"], "weight": second["weight"]}
        assert_same_bits(got, expect(run_rmsnorm, whole, place))


# ---- to_static


def specs(shapes):
    return [InputSpec(shape, dtype_of(name), name) for name, shape in shapes.items()]


def swiglu(o1, do2_s, unzipped_probs):
    return F.fused_swiglu_weighted_bwd(o1, do2_s, unzipped_probs)


def rmsnorm(grad_out, x, z, weight):
    return F.cake_rmsnorm_silu_gate_train_backward(grad_out, x, z, weight, eps=1e-5)


def rmsnorm_without_weight(grad_out, x, z, weight):
    return F.cake_rmsnorm_silu_gate_train_backward(grad_out, x, z, weight, eps=1e-5, compute_grad_weight=False)


@pytest.mark.parametrize("with_spec", [True, False])
def test_swiglu_to_static(place, with_spec):
    static = paddle.jit.to_static(swiglu, input_spec=specs(SWIGLU_SHAPES) if with_spec else None, full_graph=True)
    for rows in ROW_COUNTS:
        inputs = testing.swiglu_weighted_inputs(rows, WIDTH, seed=rows)
        outputs = static(*tensors_of(inputs, place).values())
        assert all(tensor.stop_gradient for tensor in outputs)
        assert_same_bits(dict(zip(SWIGLU_OUTPUTS, map(array_of, outputs))), run_swiglu(inputs, place))


@pytest.mark.parametrize("compute", [True, False])
@pytest.mark.parametrize("with_spec", [True, False])
def test_rmsnorm_to_static(place, with_spec, compute):
    function = rmsnorm if compute else rmsnorm_without_weight
    static = paddle.jit.to_static(function, input_spec=specs(RMSNORM_SHAPES) if with_spec else None, full_graph=True)
    for rows in ROW_COUNTS:
        inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=rows)
        outputs = static(*tensors_of(inputs, place).values())
        expected = run_rmsnorm(inputs, place, eps=1e-5, compute_grad_weight=compute)
        assert_same_bits(dict(zip(RMSNORM_OUTPUTS, map(array_of, outputs))), expected)


def test_to_static_of_inputs_that_want_gradients(place):
    function = paddle.jit.to_static(swiglu, full_graph=True)
    inputs = testing.swiglu_weighted_inputs(5, WIDTH)
    tensors = tensors_of(inputs, place)
    for tensor in tensors.values():
        tensor.stop_gradient = False
    outputs = function(*tensors.values())
    assert_same_bits(dict(zip(SWIGLU_OUTPUTS, map(array_of, outputs))), run_swiglu(inputs, place))


def test_to_static_by_bytecode(place):
    if pir_exists() and not pir():
        pytest.skip("Paddle 3 translates bytecode for PIR alone")
    function = paddle.jit.to_static(rmsnorm, full_graph=False)
    for rows in (5, 7):
        inputs = testing.rmsnorm_silu_gate_inputs(rows, seed=rows)
        outputs = function(*tensors_of(inputs, place).values())
        assert_same_bits(dict(zip(RMSNORM_OUTPUTS, map(array_of, outputs))), run_rmsnorm(inputs, place, eps=1e-5))


# ---- Errors

BUFFERS = {
    "grad_x": lambda v: v["x"],
    "grad_z": lambda v: v["x"],
    "grad_weight": lambda v: v["weight"],
    "workspace": lambda v: v["x"],
    "accumulate_grad_weight": lambda v: True,
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_mean_nothing_in_a_graph(program, name):
    variables = data(RMSNORM_SHAPES)
    before = str(program)
    with pytest.raises(ValueError, match=rf"cake_rmsnorm_silu_gate_train_backward: {name}\b.*static graph"):
        F.cake_rmsnorm_silu_gate_train_backward(**variables, **{name: BUFFERS[name](variables)})
    assert str(program) == before


WRONG_DTYPES = [(name, dtype) for name in SWIGLU_INPUTS + RMSNORM_INPUTS for dtype in ("float16", "float32", "int32")]
WRONG_DTYPES = [(n, d) for n, d in WRONG_DTYPES if d != dtype_of(n)] + [("unzipped_probs", "bfloat16")]


@pytest.mark.parametrize("name, dtype", WRONG_DTYPES)
def test_wrong_dtype_when_it_is_built(program, name, dtype):
    shapes = SWIGLU_SHAPES if name in SWIGLU_SHAPES else RMSNORM_SHAPES
    variables = data(shapes)
    variables[name] = paddle.static.data("other", shapes[name], dtype)
    function = F.fused_swiglu_weighted_bwd if name in SWIGLU_SHAPES else F.cake_rmsnorm_silu_gate_train_backward
    before = str(program)
    with pytest.raises(ValueError, match=rf": {name}\b.*{dtype_of(name)}.*{dtype}"):
        function(**variables)
    assert str(program) == before


WRONG_SHAPES = {
    "o1": [[-1, 2 * WIDTH + 1], []],
    "do2_s": [[-1, WIDTH + 1], [WIDTH], [-1, -1, WIDTH]],
    "unzipped_probs": [[], [-1, 2], [-1, 1, 1]],
    "grad_out": [[-1, 127], [128], [-1, -1, 128]],
    "x": [[-1, 129], []],
    "z": [[-1, 127], [128]],
    "weight": [[127], [1, 128], []],
}


@pytest.mark.parametrize("name, shape", [(name, shape) for name, shapes in WRONG_SHAPES.items() for shape in shapes])
def test_wrong_shape_when_it_is_built(program, name, shape):
    shapes = SWIGLU_SHAPES if name in SWIGLU_SHAPES else RMSNORM_SHAPES
    variables = data(shapes)
    variables[name] = paddle.static.data("other", shape, dtype_of(name))
    function = F.fused_swiglu_weighted_bwd if name in SWIGLU_SHAPES else F.cake_rmsnorm_silu_gate_train_backward
    before = str(program)
    with pytest.raises(ValueError, match=rf": {name}\b"):
        function(**variables)
    assert str(program) == before


@pytest.mark.parametrize("value", [None, 3, np.zeros((4, 128), np.float32), "x"], ids=["None", "int", "array", "str"])
@pytest.mark.parametrize("name", SWIGLU_INPUTS + RMSNORM_INPUTS)
def test_no_variable(program, name, value):
    variables = data(SWIGLU_SHAPES if name in SWIGLU_SHAPES else RMSNORM_SHAPES)
    function = F.fused_swiglu_weighted_bwd if name in SWIGLU_SHAPES else F.cake_rmsnorm_silu_gate_train_backward
    with pytest.raises(TypeError, match=rf": {name}\b"):
        function(**{**variables, name: value})


def test_a_tensor_of_eager_mode_in_a_program(program):
    with eager():
        x = testing.bf16_tensor(np.zeros((4, 128), np.uint16), "cpu")
    with pytest.raises(TypeError, match=r": x\b"):
        F.cake_rmsnorm_silu_gate_train_backward(**{**data(RMSNORM_SHAPES), "x": x})


@pytest.mark.parametrize("name, value, error", [
    ("eps", -1.0, ValueError),
    ("eps", float("nan"), ValueError),
    ("eps", 1e39, ValueError),
    ("eps", "1e-6", TypeError),
    ("eps", None, TypeError),
    ("compute_grad_weight", 1, TypeError),
    ("compute_grad_weight", None, TypeError),
    ("accumulate_grad_weight", 0, TypeError),
    ("accumulate_grad_weight", None, TypeError),
])
def test_options_are_checked_when_it_is_built(program, name, value, error):
    with pytest.raises(error, match=rf"\b{name}\b"):
        F.cake_rmsnorm_silu_gate_train_backward(**data(RMSNORM_SHAPES), **{name: value})


RUN_TIME_SHAPES = {
    "do2_s": lambda inputs: {**inputs, "do2_s": inputs["do2_s"][:3]},
    "unzipped_probs": lambda inputs: {**inputs, "unzipped_probs": inputs["unzipped_probs"][:3]},
    "grad_out": lambda inputs: {**inputs, "grad_out": inputs["grad_out"][:3]},
    "z": lambda inputs: {**inputs, "z": inputs["z"][:1]},
}


@pytest.mark.parametrize("name", RUN_TIME_SHAPES)
def test_wrong_shape_when_it_runs(place, program, name):
    if name in SWIGLU_SHAPES:
        outputs = dict(zip(SWIGLU_OUTPUTS, F.fused_swiglu_weighted_bwd(**data(SWIGLU_SHAPES))))
        inputs = testing.swiglu_weighted_inputs(4, WIDTH)
    else:
        outputs = dict(zip(RMSNORM_OUTPUTS, F.cake_rmsnorm_silu_gate_train_backward(**data(RMSNORM_SHAPES))))
        inputs = testing.rmsnorm_silu_gate_inputs(4)
    with pytest.raises(ValueError, match=rf": {name}\b"):
        execute(place, program, RUN_TIME_SHAPES[name](inputs), outputs)
    assert execute(place, program, inputs, outputs)  # and the program is none the worse for it


# ---- The other IR


@pytest.mark.skipif(not pir_exists(), reason="Paddle 2.6 has the legacy IR alone")
@pytest.mark.skipif("FLAGS_enable_pir_api" in os.environ, reason="the IR is chosen from outside")
def test_all_of_this_in_the_legacy_ir():
    env = {**os.environ, "FLAGS_enable_pir_api": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    command += [os.path.abspath(__file__)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_ir_is_the_one_meant():
    assert pir() == (pir_exists() and os.environ.get("FLAGS_enable_pir_api") != "0")
