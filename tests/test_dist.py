"""DistTensors take the registered op: the same results, and an error for what only an eager call can do.

Over two processes the rows stay sharded, and the weight's gradient is reduced in FP32.
"""

import itertools

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import (
    RMSNORM_INPUTS,
    SWIGLU_INPUTS,
    array_of,
    assert_same_bits,
    run_python,
    run_rmsnorm,
    run_swiglu,
    tensor_of,
    tensors_of,
)
from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn import RMSNormSiLUGate
from paddle_gated_ops.incubate.nn.functional.rmsnorm_silu_gate import rmsnorm_silu_gate
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


@pytest.mark.parametrize("function, inputs", [
    (F.fused_swiglu_weighted, {n: a for n, a in testing.swiglu_weighted_inputs(5, 12).items() if n != "do2_s"}),
    (F.cake_rmsnorm_silu_gate, {n: a for n, a in testing.rmsnorm_silu_gate_inputs(5).items() if n != "grad_out"}),
])
def test_no_grad_leaves_no_node(function, inputs):
    tensors = distributed(tensors_of(inputs, "cpu"))
    for tensor in tensors.values():
        tensor.stop_gradient = False
    assert not function(**tensors).stop_gradient
    with paddle.no_grad():
        assert function(**tensors).stop_gradient


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_rmsnorm_gradients(wanted):
    inputs = testing.rmsnorm_silu_gate_inputs(5)
    tensors = distributed(tensors_of(inputs, "cpu"))
    grad_out = tensors.pop("grad_out")
    for tensor, want in zip(tensors.values(), wanted):
        tensor.stop_gradient = not want
    output = F.cake_rmsnorm_silu_gate(**tensors, eps=1e-5)
    assert output.is_dist() and output.stop_gradient == (not any(wanted))
    if not any(wanted):
        return
    paddle.autograd.backward([output], [grad_out])
    got = local([tensor.grad for tensor in tensors.values()], ("grad_x", "grad_z", "grad_weight"))
    expected = run_rmsnorm(inputs, "cpu", eps=1e-5)
    assert_same_bits(got, {name: array if want else None for (name, array), want in zip(expected.items(), wanted)})


def test_rmsnorm_main_grad():
    inputs = testing.rmsnorm_silu_gate_inputs(5)
    tensors = distributed(tensors_of(inputs, "cpu"))
    grad_out, weight = tensors.pop("grad_out"), tensors["weight"]
    weight.stop_gradient = False
    main_grad = distributed({"main_grad": tensor_of(np.full(128, 0.5, np.float32), "cpu")})["main_grad"]
    weight.main_grad = main_grad
    paddle.autograd.backward([F.cake_rmsnorm_silu_gate(**tensors)], [grad_out])
    assert weight.grad is None
    fp32 = run_rmsnorm(inputs, "cpu", grad_weight=tensor_of(np.zeros(128, np.float32), "cpu"))["grad_weight"]
    assert_same_bits({"": array_of(main_grad._local_value())}, {"": fp32 + np.float32(0.5)})


def fp32_weight_layer(bits):
    """RMSNormSiLUGate with a FP32 weight, and the BF16 bits that the weight is cast to."""
    layer = RMSNormSiLUGate()
    # Between BF16 numbers, but no tie.
    layer.weight.set_value(testing.from_bf16_bits(bits).astype(np.float32) * np.float32(1 + 2.0**-10))
    return layer, array_of(layer.weight.detach().astype("bfloat16"))


@pytest.mark.parametrize("with_main_grad", [False, True])
def test_fp32_weight(with_main_grad):
    paddle.set_device("cpu")
    inputs = testing.rmsnorm_silu_gate_inputs(40)
    layer, inputs["weight"] = fp32_weight_layer(inputs["weight"])
    tensors = distributed({name: tensor_of(inputs[name], "cpu") for name in ("grad_out", "x", "z")})
    tensors["x"].stop_gradient = False
    weight = layer.weight = distributed({"weight": layer.weight})["weight"]
    if with_main_grad:
        weight.main_grad = distributed({"main_grad": tensor_of(np.zeros(128, np.float32), "cpu")})["main_grad"]
    output = layer(tensors["x"], tensors["z"])
    assert output.is_dist()
    paddle.autograd.backward([output], [tensors["grad_out"]])
    assert (weight.grad is None) == with_main_grad
    got = [tensors["x"].grad, weight.main_grad if with_main_grad else weight.grad]
    expected = run_rmsnorm(inputs, "cpu", grad_weight=tensor_of(np.zeros(128, np.float32), "cpu"))
    assert_same_bits(local(got, ("grad_x", "grad_weight")), {n: expected[n] for n in ("grad_x", "grad_weight")})


@pytest.mark.parametrize("recorded", [False, True])
def test_the_functions_take_no_fp32_weight(recorded):
    tensors = tensors_of(testing.rmsnorm_silu_gate_inputs(5), "cpu")
    tensors["weight"] = tensors["weight"].astype("float32")
    tensors = distributed(tensors)
    with pytest.raises(ValueError, match="^cake_rmsnorm_silu_gate_train_backward: weight must have dtype bfloat16"):
        F.cake_rmsnorm_silu_gate_train_backward(**tensors)
    del tensors["grad_out"]
    tensors["x"].stop_gradient = not recorded
    with pytest.raises(ValueError, match="^cake_rmsnorm_silu_gate: weight must have dtype bfloat16"):
        F.cake_rmsnorm_silu_gate(**tensors)


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


# ---- The rules, in one process: a program over a mesh of four tells where each tensor of an op has to be.

S0, S1, LAST = 0, 1, 2  # what a dimension of the mesh shards; None: nothing
SWIGLU_SHAPES = {"o1": [8, 4, 24], "do2_s": [8, 4, 12], "unzipped_probs": [8, 4, 1]}
RMSNORM_SHAPES = {**{name: [8, 4, 128] for name in ("grad_out", "x", "z")}, "weight": [128]}


def placements_of(op, inputs, fp32=("unzipped_probs",)):
    """Placements over the mesh [2, 2] that the rule of an op in a program asks of its inputs, and gives its outputs.

    Args:
        op (callable): from variables by name to the op's outputs.
        inputs (dict): name to (shape, [what the first dimension of the mesh shards, what the second does]); None for the
            latter is a variable that is not distributed.
        fp32 (sequence): the names of those in FP32.
    """
    import paddle.distributed as dist
    from paddle.base.libpaddle.pir import create_tensor_dist_attribute
    from paddle.distributed.auto_parallel.placement_type import to_dim_map

    mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["a", "b"])
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            variables = {}
            for name, (shape, split) in inputs.items():
                variable = variables[name] = paddle.static.data(name, shape, "float32" if name in fp32 else "bfloat16")
                variable.stop_gradient = False
                if split is None:
                    continue
                placements = [dist.Replicate() if dim is None else dist.Shard(dim) for dim in split]
                variable.update_dist_attr(create_tensor_dist_attribute(mesh, *to_dim_map(placements, len(shape))))
            rule = op(**variables)[0].get_defining_op().dist_attr
            operands = [rule.operand(i) for i in range(len(inputs))]
            results = [rule.result(i) for i in range(rule.num_results())]
            return [[split_of(attr.as_tensor_dist_attr()) for attr in attrs] for attrs in (operands, results)]
    except Exception as error:  # its traceback holds variables, which crash pytest once the program is gone
        raise AssertionError(f"{type(error).__name__}: {error}") from None
    finally:
        paddle.disable_static()


def split_of(attr):
    return [
        "sum" if placement.is_partial() else placement.get_dim() if placement.is_shard() else None
        for placement in attr.placements
    ]


def registered(name, *attributes):
    from paddle import _C_ops

    return lambda **variables: as_list(_C_ops._run_custom_op("gated_" + name, *variables.values(), *attributes))


def gradient_of(name, given, *attributes):
    """The grad op of a forward; ``given`` is the input that is the output's gradient."""

    def grad(**variables):
        inputs = {name: variable for name, variable in variables.items() if name != given}
        outputs = registered(name, *attributes)(**inputs)
        return paddle.static.gradients(outputs, list(inputs.values()), [variables[given]])

    return grad


def as_list(outputs):
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


NORM = "cake_rmsnorm_silu_gate"
# Op, its inputs, those of its inputs and outputs that are not split by rows, and its weight gradient's place.
RULES = {
    "swiglu forward": (registered("fused_swiglu_weighted", 0.0), "o1 unzipped_probs", 1, None),
    "swiglu backward": (registered("fused_swiglu_weighted_bwd", 0.0), "o1 do2_s unzipped_probs", 3, None),
    "swiglu gradient": (
        gradient_of("fused_swiglu_weighted", "do2_s", 0.0), "o1 unzipped_probs do2_s", 2, None
    ),
    "rmsnorm forward": (registered(NORM, 1e-6), "x z weight", 1, None),
    "rmsnorm backward": (registered(NORM + "_train_backward", 1e-6), "grad_out x z weight", 3, 2),
    "rmsnorm backward without weight": (
        registered(NORM + "_train_backward_without_weight", 1e-6), "grad_out x z weight", 2, None
    ),
    "rmsnorm gradient": (gradient_of(NORM, "grad_out", 1e-6), "x z weight grad_out", 3, 2),
}


@pytest.mark.parametrize("first, others, rows", [
    ([None, None], [None, None], [None, None]),
    ([S0, None], [S0, None], [S0, None]),
    ([S0, S1], [S0, S1], [S0, S1]),
    ([S1, S0], [S1, S0], [S1, S0]),
    ([S0, None], [None, None], [S0, None]),  # the others are cut as well
    ([S0, None], [None, S1], [S0, S1]),
    ([S0, None], [S1, None], [S0, None]),  # one dimension of the mesh shards one of the rows: the first input's
    ([None, LAST], [None, None], [None, None]),  # the last dimension is gathered
    ([S0, LAST], [S0, LAST], [S0, None]),
    ([LAST, S1], [LAST, None], [None, S1]),
])
@pytest.mark.parametrize("name", RULES)
def test_rules(name, first, others, rows):
    op, inputs, num_outputs, weight_grad = RULES[name]
    inputs = inputs.split()
    shapes = SWIGLU_SHAPES if "o1" in inputs else RMSNORM_SHAPES
    leading = "o1" if "o1" in inputs else "x"  # the input that decides
    given = {input: (shapes[input], first if input == leading else others) for input in inputs if input != "weight"}
    if "weight" in inputs:
        given["weight"] = (shapes["weight"], [0, None])
    given = {input: given[input] for input in inputs}
    operands, results = placements_of(op, given)
    assert operands == [[None, None] if input == "weight" else rows for input in inputs]
    partial = [None if dim is None else "sum" for dim in rows]
    assert results == [partial if i == weight_grad else rows for i in range(num_outputs)]


def explicit_gradient(**variables):
    return F.cake_rmsnorm_silu_gate_train_backward(**variables)[2]


def gradient_through(function):
    def gradient(grad_out, **inputs):
        return paddle.static.gradients([function(**inputs)], [inputs["weight"]], [grad_out])[0]

    return gradient


def weight_gradient_ops(gradient, inputs, **options):
    """What a program does to the sum that each process has: [op, its result's placements, its result's dtype], and where
    the sum itself is partial."""
    seen = []

    def backward(**variables):
        value = gradient(**variables)
        while value.get_defining_op().num_operands() == 1:
            seen.insert(0, (value.get_defining_op().name(), split_of(value.dist_attr()), str(value.dtype)))
            value = value.get_defining_op().operand_source(0)
        seen.insert(0, str(value.dtype))
        return [value]

    _, results = placements_of(backward, inputs, **options)
    return seen, results[2]


ROWS = [S0, S1]
DIST_INPUTS = {name: (shape, [None, None] if name == "weight" else ROWS) for name, shape in RMSNORM_SHAPES.items()}
REDUCED_IN_FP32 = [
    "paddle.float32",
    ("dist_op.reshard", [None, None], "paddle.float32"),
    ("pd_op.cast", [None, None], "paddle.bfloat16"),
]


@pytest.mark.parametrize("weight", ["distributed", "dense"])
@pytest.mark.parametrize("gradient", [explicit_gradient, gradient_through(F.cake_rmsnorm_silu_gate)])
def test_a_program_reduces_the_weight_gradient_before_it_rounds(gradient, weight):
    inputs = {**DIST_INPUTS, "weight": ([128], None)} if weight == "dense" else DIST_INPUTS
    assert weight_gradient_ops(gradient, inputs) == (REDUCED_IN_FP32, ["sum", "sum"])


def test_a_gradient_that_is_sharded_later_on():
    inputs = {name: (shape, ROWS if name == "grad_out" else [None, None]) for name, shape in RMSNORM_SHAPES.items()}
    found = weight_gradient_ops(gradient_through(F.cake_rmsnorm_silu_gate), inputs)
    assert found == (REDUCED_IN_FP32, ["sum", "sum"])


def test_a_program_does_not_round_the_gradient_of_a_fp32_weight():
    def function(x, z, weight):
        return rmsnorm_silu_gate(x, z, weight, 1e-6, cast_weight=True)

    found = weight_gradient_ops(gradient_through(function), DIST_INPUTS, fp32=("weight",))
    assert found == (["paddle.float32"], ["sum", "sum"])


def test_create_graph_of_swiglu_on_dist_tensors():
    import paddle.distributed as dist

    mesh = dist.ProcessMesh([0], dim_names=["x"])
    arrays = testing.swiglu_weighted_inputs(4, 8)
    o1 = dist.shard_tensor(tensor_of(arrays["o1"], "cpu"), mesh, [dist.Replicate()], stop_gradient=False)
    o1.stop_gradient = False
    probs = dist.shard_tensor(tensor_of(arrays["unzipped_probs"], "cpu"), mesh, [dist.Replicate()])
    output = F.fused_swiglu_weighted(o1, probs)
    with pytest.raises(NotImplementedError, match="fused_swiglu_weighted: .*create_graph=False"):
        paddle.grad(output, o1, grad_outputs=paddle.ones_like(output), create_graph=True)


# Paddle's own way to run such programs asks for GPUs where there is more than one process.
TRAIN = """
import numpy as np, paddle
import paddle.distributed as dist
from paddle_gated_ops.incubate.nn import RMSNormSiLUGate

class Model(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = paddle.nn.Linear(16, 128), RMSNormSiLUGate()

    def forward(self, x):
        hidden = self.linear(x).astype("bfloat16")
        return self.norm(hidden, hidden).astype("float32")

def mean_square(output, target):
    return ((output - target) ** 2).mean()

generator = np.random.default_rng(0)
x, target = (paddle.to_tensor(generator.standard_normal((8, n), dtype=np.float32)) for n in (16, 128))
paddle.seed(0)
eager, static = Model(), Model()
static.set_state_dict(eager.state_dict())
losses = []
optimizer = paddle.optimizer.SGD(0.5, parameters=eager.parameters())
for _ in range(3):
    loss = mean_square(eager(x), target)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))

mesh = dist.ProcessMesh([0], dim_names=["data"])
for layer in (static.linear, static.norm):
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, dist.shard_tensor(parameter, mesh, [dist.Replicate()]))
loader = paddle.io.DataLoader(paddle.io.TensorDataset([x, target]), batch_size=8)
optimizer = paddle.optimizer.SGD(0.5, parameters=static.parameters())
model = dist.to_static(static, loader, mean_square, optimizer)
model.train()
assert [float(model(x, target)) for _ in range(3)] == losses and losses[2] < losses[0]
np.testing.assert_array_equal(model.state_dict()["norm.weight"].numpy(), eager.norm.weight.numpy())
"""


def test_a_static_model_trains_as_an_eager_one():
    run_python(TRAIN)


# ---- In two processes. Paddle's CPU build moves no BF16 tensor between placements: inputs are sharded in FP32 and then
# cast, and outputs are compared shard by shard.


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


def check_fp32_weight_gradient(rank):
    import paddle.distributed as dist

    inputs = testing.rmsnorm_silu_gate_inputs((6, 4))
    layer, inputs["weight"] = fp32_weight_layer(inputs["weight"])
    tensors = sharded({name: inputs[name] for name in ("grad_out", "x", "z")}, dist.Shard(0))
    weight = layer.weight = dist.shard_tensor(layer.weight, tensors["x"].process_mesh, [dist.Replicate()])
    paddle.autograd.backward([layer(tensors["x"], tensors["z"])], [tensors["grad_out"]])
    total = np.zeros(128, np.float32)
    for part in range(PROCESSES):
        rows = {n: a if n == "weight" else np.array_split(a, PROCESSES)[part] for n, a in inputs.items()}
        total += run_rmsnorm(rows, "cpu", grad_weight=tensor_of(np.zeros(128, np.float32), "cpu"))["grad_weight"]
    assert weight.grad.placements[0].is_replicated()
    assert_same_bits({"grad_weight": array_of(weight.grad._local_value())}, {"grad_weight": total})


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
