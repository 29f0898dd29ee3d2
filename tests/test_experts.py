"""WeightedSwiGLUExperts: one autograd node over both products and the activation, as a layer of Paddle's."""

import gc
import itertools
import weakref

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute
from paddle.static import InputSpec

from calls import run_python, tensor_of
from paddle_gated_ops import _amp, testing
from paddle_gated_ops._library import C
from paddle_gated_ops.incubate.nn import WeightedSwiGLUExperts
from paddle_gated_ops.incubate.nn import functional as F
from paddle_gated_ops.incubate.nn.layer import weighted_swiglu_experts
from paddle_gated_ops.testing import reference

OLD = paddle.__version__.startswith("2.")
EXPERTS, HIDDEN, INTERMEDIATE = 4, 24, 20
ROUTINGS = ([3, 0, 6, 1], [0, 0, 0, 10], [10, 0, 0, 0], [1, 2, 3, 4])  # rows of each expert
NAMES = ("tokens", "probs", "up_gate_proj", "down_proj")
SOME = [combination for combination in itertools.product([True, False], repeat=4) if any(combination)]


@pytest.fixture(autouse=True)
def on_cpu():
    # Paddle's own product is part of the layer: there is one to rely on in CPU builds.
    before = paddle.get_device()
    paddle.set_device("cpu")
    yield
    paddle.set_device(before)


@pytest.fixture
def default_dtype():
    before = paddle.get_default_dtype()
    yield paddle.set_default_dtype
    paddle.set_default_dtype(before)


def fp32(array):
    return paddle.to_tensor(np.asarray(array, "float32"), place=paddle.CPUPlace(), stop_gradient=False)


def make_layer(seed=0):
    paddle.seed(seed)
    return WeightedSwiGLUExperts(EXPERTS, HIDDEN, INTERMEDIATE)


def make_arrays(rows=10, seed=0, column=False):
    random = np.random.default_rng(seed)
    arrays = {"tokens": (rows, HIDDEN), "probs": (rows, 1) if column else (rows,), "grad": (rows, HIDDEN)}
    arrays = {name: random.standard_normal(shape).astype("float32") for name, shape in arrays.items()}
    arrays["probs"] = np.abs(arrays["probs"])
    return arrays


def clear_gradients(layer):
    for parameter in layer.parameters():
        parameter.clear_gradient(set_to_zero=False)


def run(call, layer, arrays, counts, wanted=(True,) * 4):
    """The output's array and the gradients' by name, None where there is none."""
    tokens, probs = fp32(arrays["tokens"]), fp32(arrays["probs"])
    tensors = dict(zip(NAMES, (tokens, probs, layer.up_gate_proj, layer.down_proj)))
    clear_gradients(layer)
    for tensor, want in zip(tensors.values(), wanted):
        tensor.stop_gradient = not want
    output = call(tokens, probs, counts)
    paddle.autograd.backward([output], [paddle.to_tensor(arrays["grad"])])
    grads = {name: None if tensor.grad is None else tensor.grad.numpy() for name, tensor in tensors.items()}
    return {"output": output.numpy(), **grads}


def by_hand(layer, arrays, counts):
    """The same, expert by expert, from Paddle's products and the library's functions."""
    tokens, probs, grad = (paddle.to_tensor(arrays[name]) for name in ("tokens", "probs", "grad"))
    result = {"output": [], "tokens": [], "probs": [], "up_gate_proj": [], "down_proj": []}
    with paddle.no_grad():
        for expert, end in enumerate(np.cumsum(counts)):
            part = slice(end - counts[expert], end)
            up_gate, down = layer.up_gate_proj[expert], layer.down_proj[expert]
            if counts[expert] == 0:
                result["up_gate_proj"].append(paddle.zeros_like(up_gate))
                result["down_proj"].append(paddle.zeros_like(down))
                continue
            o1 = paddle.matmul(tokens[part], up_gate).astype("bfloat16")
            result["output"].append(
                paddle.matmul(F.fused_swiglu_weighted(o1, probs[part]).astype("float32"), down)
            )
            do2_s = paddle.matmul(grad[part], down, transpose_y=True).astype("bfloat16")
            do1, probs_grad, o2_s = F.fused_swiglu_weighted_bwd(o1, do2_s, probs[part])
            do1, o2_s = do1.astype("float32"), o2_s.astype("float32")
            result["tokens"].append(paddle.matmul(do1, up_gate, transpose_y=True))
            result["probs"].append(probs_grad)
            result["up_gate_proj"].append(paddle.matmul(tokens[part], do1, transpose_x=True))
            result["down_proj"].append(paddle.matmul(o2_s, grad[part], transpose_x=True))
    joined = {name: np.concatenate([part.numpy() for part in result[name]]) for name in ("output", "tokens", "probs")}
    return {**joined, **{name: np.stack([part.numpy() for part in result[name]]) for name in NAMES[2:]}}


def assert_same(got, expected, names=("output", *NAMES)):
    for name in names:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


# ---- Values


@pytest.mark.parametrize("counts", ROUTINGS)
@pytest.mark.parametrize("column", [False, True])
def test_bits_of_the_functions(counts, column):
    layer, arrays = make_layer(), make_arrays(column=column)
    got = run(layer, layer, arrays, counts)
    assert_same(got, by_hand(layer, arrays, counts))
    assert got["output"].shape == (10, HIDDEN) and got["probs"].shape == arrays["probs"].shape


@pytest.mark.parametrize("counts", ROUTINGS)
def test_float64_with_products_that_round_nothing(counts):
    inputs = testing.swiglu_weighted_inputs((10,), 16)
    probs = inputs["unzipped_probs"]
    owner = np.repeat(np.arange(4), counts)
    # Powers of two on the diagonals: o1, do2_s and o2_s are known exactly.
    scales = 2.0 ** np.arange(4)
    layer = WeightedSwiGLUExperts(4, 32, 16)
    layer.up_gate_proj.set_value((scales[:, None, None] * np.eye(32)).astype("float32"))
    layer.down_proj.set_value((scales[:, None, None] * np.eye(16, 32)).astype("float32"))
    scale = scales[owner][:, None]
    tokens = testing.from_bf16_bits(inputs["o1"]) / scale
    grad = testing.from_bf16_bits(inputs["do2_s"]) @ np.eye(16, 32) / scale
    got = run(layer, layer, {"tokens": tokens, "probs": probs, "grad": grad.astype("float32")}, counts)

    expected = reference.fused_swiglu_weighted_bwd(**inputs)
    o2_s = got["output"][:, :16] / scale
    assert not got["output"][:, 16:].any()
    outputs = {"do1": testing.to_bf16_bits(got["tokens"] / scale), "probs_grad": got["probs"]}
    testing.assert_swiglu_weighted_bwd(inputs, {**outputs, "o2_s": testing.to_bf16_bits(o2_s)})
    for name, rows, grads in (("up_gate_proj", tokens, expected.do1), ("down_proj", expected.o2_s, grad)):
        true, terms = (np.zeros(got[name].shape) for _ in range(2))
        np.add.at(true, owner, np.einsum("ri,ro->rio", rows, grads))
        np.add.at(terms, owner, np.abs(np.einsum("ri,ro->rio", rows, grads)))
        # do1 and o2_s are within one ulp, 2^-7 at most of their size.
        assert (np.abs(got[name] - true) <= 2.0**-7 * terms).all(), name


def test_float64_with_random_weights():
    layer, counts = make_layer(), ROUTINGS[0]
    arrays = make_arrays()
    got = run(layer, layer, arrays, counts)
    owner = np.repeat(np.arange(EXPERTS), counts)
    up_gate, down = (parameter.numpy().astype("float64")[owner] for parameter in layer.parameters())
    tokens, probs, grad = (arrays[name].astype("float64") for name in ("tokens", "probs", "grad"))
    o1 = np.einsum("ri,rio->ro", tokens, up_gate)
    do2_s = np.einsum("ro,rio->ri", grad, down)
    true = reference.fused_swiglu_weighted_bwd(o1, do2_s, probs)
    expected = {
        "output": np.einsum("ri,rio->ro", true.o2_s, down),
        "tokens": np.einsum("ro,rio->ri", true.do1, up_gate),
        "probs": true.probs_grad,
        "up_gate_proj": np.zeros(layer.up_gate_proj.shape),
        "down_proj": np.zeros(layer.down_proj.shape),
    }
    np.add.at(expected["up_gate_proj"], owner, np.einsum("ri,ro->rio", tokens, true.do1))
    np.add.at(expected["down_proj"], owner, np.einsum("ri,ro->rio", true.o2_s, grad))
    for name, value in expected.items():
        # o1, do2_s and a result are rounded to BF16, each by up to 2^-8 (2^-7 where the cast truncates).
        assert np.linalg.norm(got[name] - value) <= 3 * 2.0**-7 * np.linalg.norm(value), name


@pytest.mark.parametrize("wanted", SOME)
def test_gradients_where_wanted(wanted):
    layer, arrays, counts = make_layer(), make_arrays(), ROUTINGS[0]
    got = run(layer, layer, arrays, counts, wanted)
    expected = run(layer, layer, arrays, counts)
    assert_same(got, expected, ["output", *(name for name, want in zip(NAMES, wanted) if want)])
    for name, want in zip(NAMES, wanted):
        assert (got[name] is not None) == want, name


@pytest.mark.parametrize(
    "make", [tuple, np.array, lambda counts: np.array(counts, np.uint8), lambda counts: [*map(np.int32, counts)]]
)
def test_counts_as_ints(make):
    layer, arrays, counts = make_layer(), make_arrays(), ROUTINGS[3]
    assert_same(run(layer, layer, arrays, make(counts)), run(layer, layer, arrays, counts))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64"])
def test_counts_as_a_tensor(dtype):
    layer, arrays, counts = make_layer(), make_arrays(), ROUTINGS[3]
    tensor = paddle.to_tensor(counts, dtype=dtype, place=paddle.CPUPlace())
    assert_same(run(layer, layer, arrays, tensor), run(layer, layer, arrays, counts))


WITHOUT_VIEWS = """
import numpy as np, paddle
import test_experts as t

flag = 'FLAGS_use_stride_kernel'
assert not paddle.get_flags(flag)[flag]
paddle.set_device('cpu')
for on in (False, True, False):
    paddle.set_flags({flag: on})
    for counts in (*t.ROUTINGS, [0, 0, 0, 0]):
        layer, arrays = t.make_layer(), t.make_arrays(rows=sum(counts))
        got = t.run(layer, layer, arrays, counts)
        if sum(counts):
            t.assert_same(got, t.by_hand(layer, arrays, counts))
        layer = t.make_layer()
        weights = layer.parameters()
        for weight in weights:
            weight.main_grad = paddle.ones(weight.shape)
        buffers = [weight.main_grad for weight in weights]
        t.run(layer, layer, arrays, counts)
        for name, weight, buffer in zip(t.NAMES[2:], weights, buffers):
            assert weight.grad is None and weight.main_grad is buffer
            np.testing.assert_array_equal(buffer.numpy(), 1 + got[name])
print('right')
"""


def test_slices_that_are_copies():
    assert run_python(WITHOUT_VIEWS, FLAGS_use_stride_kernel="0") == "right"


def test_no_rows():
    layer = make_layer()
    got = run(layer, layer, make_arrays(rows=0), [0, 0, 0, 0])
    assert got["output"].shape == (0, HIDDEN)
    for name, shape in (("tokens", (0, HIDDEN)), ("probs", (0,))):
        assert (got[name] is None and OLD) or got[name].shape == shape  # 2.6 drops gradients without elements
    assert got["up_gate_proj"].shape == tuple(layer.up_gate_proj.shape) and not got["up_gate_proj"].any()
    assert got["down_proj"].shape == tuple(layer.down_proj.shape) and not got["down_proj"].any()


# ---- Memory and work


class Recorder:
    """Records the calls of functions of an object; they are still made."""

    def __init__(self, monkeypatch, owner, *names):
        self.calls = {name: [] for name in names}
        for name in names:
            monkeypatch.setattr(owner, name, self._wrap(name, getattr(owner, name)))

    def _wrap(self, name, function):
        def recorded(*arguments, **keywords):
            result = function(*arguments, **keywords)
            self.calls[name].append((arguments, result))
            return result

        return recorded


def test_saved_tensors():
    layer, arrays = make_layer(), make_arrays()
    saved = []
    with paddle.autograd.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(fp32(arrays["tokens"]), fp32(arrays["probs"]), ROUTINGS[0])
    shapes = sorted((tuple(tensor.shape), str(tensor.dtype).rsplit(".")[-1]) for tensor in saved)
    assert shapes == sorted(
        [
            ((10, HIDDEN), "float32"),
            ((10,), "float32"),
            ((EXPERTS, HIDDEN, 2 * INTERMEDIATE), "float32"),
            ((EXPERTS, INTERMEDIATE, HIDDEN), "float32"),
            ((10, 2 * INTERMEDIATE), "bfloat16"),
        ]
    )


def test_o2_s_is_not_kept_for_the_backward_but_taken_from_it(monkeypatch):
    layer, arrays = make_layer(), make_arrays()
    kept = []
    forward = C.fused_swiglu_weighted

    def remembered(*arguments):
        o2_s = forward(*arguments)
        kept.append(weakref.ref(o2_s))
        return o2_s

    monkeypatch.setattr(C, "fused_swiglu_weighted", remembered)
    backward = Recorder(monkeypatch, C, "fused_swiglu_weighted_bwd_out").calls["fused_swiglu_weighted_bwd_out"]
    output = layer(fp32(arrays["tokens"]), fp32(arrays["probs"]), ROUTINGS[0])
    gc.collect()
    assert len(kept) == 1 and kept[0]() is None
    output.sum().backward()
    assert len(kept) == 1  # no second forward
    ((arguments, results),) = backward
    _, o1, do2_s = arguments[:3]
    # No memory of their own: do1 lies in o1, o2_s in do2_s.
    assert results[0] is o1 and results[2] is do2_s


@pytest.mark.parametrize("wanted", SOME)
def test_what_nobody_wants_is_not_computed(monkeypatch, wanted):
    layer, arrays = make_layer(), make_arrays()
    want_tokens, want_probs, want_up_gate, want_down = wanted
    tensors = fp32(arrays["tokens"]), fp32(arrays["probs"]), layer.up_gate_proj, layer.down_proj
    for tensor, want in zip(tensors, wanted):
        tensor.stop_gradient = not want
    output = layer(*tensors[:2], ROUTINGS[3])
    ops = Recorder(monkeypatch, C, "fused_swiglu_weighted_bwd_out", "fused_swiglu_weighted").calls
    products = Recorder(monkeypatch, paddle, "matmul").calls["matmul"]
    paddle.autograd.backward([output], [paddle.to_tensor(arrays["grad"])])
    only_down = not (want_tokens or want_probs or want_up_gate)
    assert len(products) == EXPERTS * ((not only_down) + want_tokens + want_up_gate + want_down)
    if only_down:
        assert not ops["fused_swiglu_weighted_bwd_out"] and len(ops["fused_swiglu_weighted"]) == 1
    else:
        ((_, (do1, probs_grad, o2_s)),) = ops["fused_swiglu_weighted_bwd_out"]
        assert (do1 is not None) == (want_tokens or want_up_gate)
        assert (probs_grad is not None) == want_probs and (o2_s is not None) == want_down


def test_no_grad_leaves_no_node_and_keeps_nothing():
    layer, arrays = make_layer(), make_arrays()
    tokens = fp32(arrays["tokens"])
    expected = layer(tokens, fp32(arrays["probs"]), ROUTINGS[0])
    assert not expected.stop_gradient
    with paddle.no_grad():
        output = layer(tokens, fp32(arrays["probs"]), ROUTINGS[0])
    assert output.stop_gradient
    assert output.grad_fn is None or output.grad_fn.name() == "GradNodeAccumulation"  # 2.6: of paddle.empty itself
    assert np.array_equal(output.numpy(), expected.numpy())
    gone = weakref.ref(tokens)
    del tokens, expected
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("recorded", [True, False])
def test_o1_is_kept_for_a_backward_alone(monkeypatch, recorded):
    layer, arrays = make_layer(), make_arrays()
    o1, alive = [], []
    forward, down = C.fused_swiglu_weighted, weighted_swiglu_experts._down
    monkeypatch.setattr(C, "fused_swiglu_weighted", lambda *inputs: o1.append(weakref.ref(inputs[0])) or forward(*inputs))
    monkeypatch.setattr(
        weighted_swiglu_experts, "_down", lambda *inputs: alive.append(o1[0]() is not None) or down(*inputs)
    )
    with paddle.set_grad_enabled(recorded):
        layer(fp32(arrays["tokens"]), fp32(arrays["probs"]), ROUTINGS[0])
    assert alive == [recorded]


def test_inputs_are_not_written():
    layer, arrays = make_layer(), make_arrays()
    tokens, probs, grad = fp32(arrays["tokens"]), fp32(arrays["probs"]), paddle.to_tensor(arrays["grad"])
    before = [parameter.numpy() for parameter in layer.parameters()]
    paddle.autograd.backward([layer(tokens, probs, ROUTINGS[0])], [grad])
    after = [parameter.numpy() for parameter in layer.parameters()]
    for tensor, name in ((tokens, "tokens"), (probs, "probs"), (grad, "grad")):
        np.testing.assert_array_equal(tensor.numpy(), arrays[name])
    assert all(map(np.array_equal, before, after))


class Context:
    """As much of a PyLayer's context as the node uses."""

    def save_for_backward(self, *tensors):
        self.tensors = tensors

    def saved_tensor(self):
        return self.tensors


@pytest.mark.parametrize("wanted", SOME)
def test_a_second_backward_is_right_although_the_first_wrote_over_o1(wanted):
    layer, arrays, counts = make_layer(), make_arrays(), tuple(ROUTINGS[0])
    ctx = Context()
    tensors = fp32(arrays["tokens"]), fp32(arrays["probs"]), layer.up_gate_proj, layer.down_proj
    for tensor, want in zip(tensors, wanted):
        tensor.stop_gradient = not want
    grad = paddle.to_tensor(arrays["grad"])
    node = weighted_swiglu_experts._Node
    with paddle.no_grad():
        node.forward(ctx, *tensors, counts, paddle.float32)
        results = [[each if each is None else each.numpy() for each in node.backward(ctx, grad)] for _ in range(3)]
    for again in results[1:]:
        for first, other in zip(results[0], again):
            assert (first is None) == (other is None)
            assert first is None or np.array_equal(first, other)


# ---- main_grad


@pytest.mark.parametrize("which", [("up_gate_proj",), ("down_proj",), ("up_gate_proj", "down_proj")])
def test_main_grad_over_micro_batches(which):
    layer = make_layer()
    hooks, true = [], {}
    for name in which:
        weight = getattr(layer, name)
        weight.main_grad = paddle.full(weight.shape, 2.0)
        weight._register_backward_hook(lambda name=name: hooks.append(name))
        true[name] = np.full(weight.shape, 2.0)
    buffers = {name: getattr(layer, name).main_grad for name in which}
    twin = make_layer()
    for seed, counts in enumerate(ROUTINGS):
        arrays = make_arrays(seed=seed)
        got, expected = run(layer, layer, arrays, counts), run(twin, twin, arrays, counts)
        rest = [name for name in ("output", *NAMES) if name not in which]
        assert_same(got, expected, rest)
        assert all(got[name] is None for name in which)
        assert sorted(hooks) == sorted(which)
        hooks.clear()
        for name in which:
            true[name] += expected[name].astype("float64")
    for name in which:
        assert getattr(layer, name).main_grad is buffers[name]
        # Four additions in FP32.
        bound = 4 * 2.0**-24 * np.abs(true[name]).max()
        assert np.abs(buffers[name].numpy() - true[name]).max() <= bound


@pytest.mark.parametrize("name", NAMES[2:])
@pytest.mark.parametrize("wrong", ["bfloat16", "shape", "no tensor"])
def test_a_wrong_main_grad_is_refused_before_anything_is_written(name, wrong):
    layer, arrays = make_layer(), make_arrays()
    for weight in layer.parameters():
        weight.main_grad = paddle.zeros(weight.shape)
    weight = getattr(layer, name)
    weight.main_grad = {
        "bfloat16": paddle.zeros(weight.shape, "bfloat16"),
        "shape": paddle.zeros([HIDDEN]),
        "no tensor": np.zeros(weight.shape, "float32"),
    }[wrong]
    with pytest.raises((ValueError, OSError), match=f"ValueError.*main_grad of {name} must be a float32 Tensor"):
        run(layer, layer, arrays, ROUTINGS[0])
    for other in set(NAMES[2:]) - {name}:
        assert not getattr(layer, other).main_grad.numpy().any()


# ---- Recompute, graphs, AMP, BF16


def test_create_graph_is_refused():
    layer, arrays = make_layer(), make_arrays()
    tokens = fp32(arrays["tokens"])
    output = layer(tokens, fp32(arrays["probs"]), ROUTINGS[0])
    with pytest.raises(NotImplementedError, match="create_graph=False"):
        paddle.grad([output], [tokens], create_graph=True)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute(use_reentrant):
    layer, arrays = make_layer(), make_arrays()

    def recomputed(*arguments):
        return recompute(layer, *arguments, use_reentrant=use_reentrant, preserve_rng_state=False)

    got = run(recomputed, layer, arrays, ROUTINGS[0])
    assert_same(got, run(layer, layer, arrays, ROUTINGS[0]))


class Routed(paddle.nn.Layer):
    def __init__(self, experts, counts):
        super().__init__()
        self.experts = experts
        self.counts = counts

    def forward(self, tokens, probs):
        return self.experts(tokens, probs, self.counts)


@pytest.mark.parametrize("counts", ROUTINGS)
@pytest.mark.parametrize("full_graph, spec", [(True, False), (True, True), (False, False)])
def test_to_static(counts, full_graph, spec):
    layer, arrays = make_layer(), make_arrays()
    spec = [InputSpec([-1, HIDDEN]), InputSpec([-1])] if spec else None
    graph = paddle.jit.to_static(Routed(layer, counts), full_graph=full_graph, input_spec=spec)
    got = run(lambda tokens, probs, _: graph(tokens, probs), layer, arrays, counts)
    assert_same(got, run(layer, layer, arrays, counts))


PROGRAM = """
import numpy as np, paddle
import test_experts as t
from paddle.static import data

arrays, counts = t.make_arrays(), t.ROUTINGS[0]
eager = t.make_layer()
expected = t.run(eager, eager, arrays, counts)
values = [parameter.numpy() for parameter in eager.parameters()]
paddle.enable_static()
program, startup = paddle.static.Program(), paddle.static.Program()
with paddle.static.program_guard(program, startup):
    tokens, probs, grad = data('tokens', [-1, t.HIDDEN]), data('probs', [-1]), data('grad', [-1, t.HIDDEN])
    tokens.stop_gradient = probs.stop_gradient = False
    layer = t.WeightedSwiGLUExperts(t.EXPERTS, t.HIDDEN, t.INTERMEDIATE)
    output = layer(tokens, probs, counts)
    grads = paddle.static.gradients([output], [tokens, probs, *layer.parameters()], [grad])
executor = paddle.static.Executor(paddle.CPUPlace())
executor.run(startup)
layer.set_state_dict({name: value for name, value in zip(('up_gate_proj', 'down_proj'), values)})
got = executor.run(program, feed=arrays, fetch_list=[output, *grads])
t.assert_same(dict(zip(('output', *t.NAMES), got)), expected)
try:
    executor.run(program, feed=t.make_arrays(rows=11), fetch_list=[output])
except Exception:
    print('right')
"""


@pytest.mark.parametrize("pir", ["0", pytest.param("1", marks=pytest.mark.skipif(OLD, reason="2.6 has no PIR"))])
def test_static_program(pir):
    assert run_python(PROGRAM, FLAGS_enable_pir_api=pir) == "right"


def test_counts_as_a_tensor_where_graphs_may_break():
    layer, arrays = make_layer(), make_arrays()
    graph = paddle.jit.to_static(layer.forward, full_graph=False)
    for counts in (ROUTINGS[0], ROUTINGS[3], ROUTINGS[0]):
        tensor = paddle.to_tensor(counts, place=paddle.CPUPlace())
        expected = run(layer, layer, arrays, counts)
        got = run(lambda tokens, probs, _, tensor=tensor: graph(tokens, probs, tensor), layer, arrays, counts)
        assert_same(got, expected)


def test_counts_in_a_graph_are_a_list():
    graph, arrays = paddle.jit.to_static(make_layer(), full_graph=True), make_arrays()
    with pytest.raises(TypeError, match="tokens_per_expert must be a list of ints, but is"):
        graph(fp32(arrays["tokens"]), fp32(arrays["probs"]), paddle.to_tensor(ROUTINGS[0]))


@pytest.mark.skipif(OLD, reason="DistTensors of 2.6 have no shard_layer")
def test_dist_tensors():
    import paddle.distributed as dist

    layer, arrays, counts = make_layer(), make_arrays(), ROUTINGS[0]
    expected = run(layer, layer, arrays, counts)
    mesh = dist.ProcessMesh([0], dim_names=["x"])
    sharded = dist.shard_layer(make_layer(), mesh)
    tensors = [dist.shard_tensor(arrays[name], mesh, [dist.Replicate()]) for name in ("tokens", "probs", "grad")]
    for tensor in tensors[:2]:
        tensor.stop_gradient = False
    output = sharded(*tensors[:2], counts)
    assert output.is_dist()
    paddle.autograd.backward([output], tensors[2:])
    grads = [tensor.grad for tensor in (*tensors[:2], *sharded.parameters())]
    assert_same({name: each.numpy() for name, each in zip(("output", *NAMES), (output, *grads))}, expected)


@pytest.fixture
def bf16_products(monkeypatch):
    """Lets the CPU compute BF16 products, rounded once, as a GPU does."""
    product = paddle.matmul

    def matmul(x, y, transpose_x=False, transpose_y=False):
        assert x.dtype == y.dtype
        return product(x.astype("float32"), y.astype("float32"), transpose_x, transpose_y).astype(x.dtype)

    monkeypatch.setattr(paddle, "matmul", matmul)
    monkeypatch.setattr(weighted_swiglu_experts, "_has_bf16_matmul", lambda place: True)


def relative_error(got, expected):
    return float(np.linalg.norm(got.astype("float64") - expected) / np.linalg.norm(expected))


def as_float(tensor):
    return tensor.astype("float32").numpy()


@pytest.mark.parametrize("main_grad", [False, True])
def test_bf16_weights(bf16_products, main_grad):
    layer, twin, arrays, counts = make_layer(), make_layer(), make_arrays(), ROUTINGS[0]
    layer.to(dtype="bfloat16")
    for parameter, other in zip(layer.parameters(), twin.parameters()):
        other.set_value(as_float(parameter))
    if main_grad:
        layer.down_proj.main_grad = paddle.zeros(layer.down_proj.shape)
    tokens = paddle.to_tensor(arrays["tokens"]).astype("bfloat16")
    tokens.stop_gradient = False
    probs = fp32(arrays["probs"])
    output = layer(tokens, probs, counts)
    paddle.autograd.backward([output], [paddle.to_tensor(arrays["grad"]).astype("bfloat16")])

    got = {"tokens": tokens.grad, "up_gate_proj": layer.up_gate_proj.grad, "down_proj": layer.down_proj.grad}
    if main_grad:
        assert got["down_proj"] is None
        got["down_proj"] = layer.down_proj.main_grad.astype("bfloat16")
    expected = run(twin, twin, {**arrays, "tokens": as_float(tokens)}, counts)
    for name, tensor in {"output": output, **got}.items():
        assert tensor.dtype == paddle.bfloat16, name
        assert relative_error(as_float(tensor), expected[name]) < 4 * 2.0**-7, name
    assert relative_error(probs.grad.numpy(), expected["probs"]) < 4 * 2.0**-7


def test_bf16_products_on_the_cpu_are_refused():
    layer, arrays = make_layer(), make_arrays()
    layer.to(dtype="bfloat16")
    with pytest.raises(ValueError, match="must be in float32 on the CPU"):
        layer(fp32(arrays["tokens"]).astype("bfloat16"), fp32(arrays["probs"]), ROUTINGS[0])


def force_auto_cast(monkeypatch, dtype):
    monkeypatch.setattr(_amp, "autocast_dtype", lambda: dtype)
    monkeypatch.setattr(weighted_swiglu_experts, "autocast_dtype", lambda: dtype)


def test_auto_cast(bf16_products, monkeypatch):
    layer, arrays, counts = make_layer(), make_arrays(), ROUTINGS[0]
    expected = run(layer, layer, arrays, counts)
    force_auto_cast(monkeypatch, "bfloat16")
    clear_gradients(layer)
    tokens, probs = fp32(arrays["tokens"]), fp32(arrays["probs"]).astype("bfloat16").detach()
    probs.stop_gradient = False
    output = layer(tokens, probs, counts)
    assert output.dtype == paddle.bfloat16
    paddle.autograd.backward([output], [paddle.to_tensor(arrays["grad"]).astype("bfloat16")])
    got = {"tokens": tokens.grad, "up_gate_proj": layer.up_gate_proj.grad, "down_proj": layer.down_proj.grad}
    for name, tensor in got.items():
        assert tensor.dtype == paddle.float32, name
        assert relative_error(tensor.numpy(), expected[name]) < 6 * 2.0**-7, name
    assert probs.grad.dtype == paddle.bfloat16
    assert relative_error(as_float(probs.grad), expected["probs"]) < 6 * 2.0**-7


def test_auto_cast_with_float16_is_refused(monkeypatch):
    layer, arrays = make_layer(), make_arrays()
    force_auto_cast(monkeypatch, "float16")
    with pytest.raises(ValueError, match="auto_cast.*float16"):
        layer(fp32(arrays["tokens"]), fp32(arrays["probs"]), ROUTINGS[0])


# ---- A layer of Paddle's


def test_weights_are_drawn_as_those_of_linear_layers(default_dtype):
    layer = WeightedSwiGLUExperts(num_experts=5, hidden_size=60, intermediate_size=80)
    assert [(name, list(weight.shape)) for name, weight in layer.named_parameters()] == [
        ("up_gate_proj", [5, 60, 160]),
        ("down_proj", [5, 80, 60]),
    ]
    for weight in layer.parameters():
        assert weight.dtype == paddle.float32 and not weight.stop_gradient
        values = weight.numpy()
        limit = np.sqrt(6 / (values.shape[1] + values.shape[2]))  # Xavier's, of one expert's matrix
        for expert in values:
            assert 0.98 * limit < np.abs(expert).max() <= limit
    draws = []
    for seed in (1, 1, 2):
        draws.append(make_layer(seed).down_proj.numpy())
    assert np.array_equal(draws[0], draws[1]) and not np.array_equal(draws[0], draws[2])
    default_dtype("bfloat16")
    assert all(weight.dtype == paddle.bfloat16 for weight in make_layer().parameters())


def test_weight_attr():
    attr = paddle.ParamAttr(name="moe", learning_rate=0.5, initializer=paddle.nn.initializer.Constant(0.25))
    layer = WeightedSwiGLUExperts(2, 3, 4, weight_attr=attr)
    assert [weight.name for weight in layer.parameters()] == ["moe_up_gate_proj", "moe_down_proj"]
    assert attr.name == "moe"
    for weight in layer.parameters():
        assert (weight.numpy() == 0.25).all() and weight.optimize_attr["learning_rate"] == 0.5
    layer = WeightedSwiGLUExperts(2, 3, 4, weight_attr=paddle.nn.initializer.Constant(0.5))
    assert all((weight.numpy() == 0.5).all() for weight in layer.parameters())


def test_state_dict(tmp_path):
    layer, other, arrays = make_layer(1), make_layer(2), make_arrays()
    assert list(layer.state_dict()) == ["up_gate_proj", "down_proj"]
    paddle.save(layer.state_dict(), str(tmp_path / "experts.pdparams"))
    other.set_state_dict(paddle.load(str(tmp_path / "experts.pdparams")))
    assert_same(run(other, other, arrays, ROUTINGS[0]), run(layer, layer, arrays, ROUTINGS[0]))


def test_extra_repr():
    text = repr(WeightedSwiGLUExperts(8, 64, 96))
    assert text.startswith("WeightedSwiGLUExperts(num_experts=8, hidden_size=64, intermediate_size=96, dtype=")
    assert "float32" in text


def test_optimizer_step_lowers_a_loss():
    layer, arrays = make_layer(), make_arrays()
    target = paddle.to_tensor(arrays["grad"])
    optimizer = paddle.optimizer.AdamW(0.02, parameters=layer.parameters())
    losses = []
    for _ in range(30):
        loss = (layer(paddle.to_tensor(arrays["tokens"]), paddle.to_tensor(arrays["probs"]), ROUTINGS[3]) - target)
        loss = loss.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


# ---- Errors


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((0, 8, 8), ValueError, "num_experts must be 1 or more, but is 0"),
        ((4, -8, 8), ValueError, "hidden_size must be 1 or more"),
        ((4, 8, 0), ValueError, "intermediate_size must be 1 or more"),
        ((4.0, 8, 8), TypeError, "num_experts must be an int, but is float"),
        ((4, True, 8), TypeError, "hidden_size must be an int, but is bool"),
        ((4, 8, None), TypeError, "intermediate_size must be an int, but is NoneType"),
        ((4, 8, 8, False), ValueError, "^WeightedSwiGLUExperts: weight_attr must not be False"),
        ((4, 8, 8, 0.5), TypeError, "^WeightedSwiGLUExperts: weight_attr must be a ParamAttr.* but is float"),
        ((4, 8, 8, [None]), TypeError, "^WeightedSwiGLUExperts: weight_attr must be a ParamAttr.* but is list"),
    ],
)
def test_wrong_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        WeightedSwiGLUExperts(*arguments)


GOOD_ARRAY = np.array([3, 0, 6, 1])
GOOD = {"tokens": np.zeros((10, HIDDEN), "float32"), "probs": np.zeros(10, "float32"), "counts": [3, 0, 6, 1]}


@pytest.mark.parametrize(
    "name, value, error, words",
    [
        ("counts", [3, 0, 6, 2], ValueError, "add up to the 10 rows of tokens, but adds up to 11"),
        ("counts", [3, 0, 6], ValueError, "must have 4 counts"),
        ("counts", [3, 0, 6, 1, 0], ValueError, "must have 4 counts"),
        ("counts", [11, 0, -1, 0], ValueError, "counts of 0 or more"),
        ("counts", [3.0, 0, 6, 1], TypeError, "tokens_per_expert must be a list of ints or an integer tensor on the CPU"),
        ("counts", GOOD_ARRAY.astype("float32"), TypeError, "tokens_per_expert .* ndarray"),
        ("counts", GOOD_ARRAY.reshape(2, 2), TypeError, "tokens_per_expert .* ndarray"),
        ("counts", GOOD_ARRAY.astype(bool), TypeError, "tokens_per_expert .* ndarray"),
        ("counts", [True, 2, 6, 1], TypeError, "tokens_per_expert"),
        ("counts", None, TypeError, "tokens_per_expert .* NoneType"),
        ("counts", 10, TypeError, "tokens_per_expert"),
        ("counts", paddle.to_tensor([3.0, 0, 6, 1], place=paddle.CPUPlace()), ValueError, "must be of integers"),
        ("counts", paddle.to_tensor([[3, 0, 6, 1]], place=paddle.CPUPlace()), TypeError, "tokens_per_expert"),
        ("counts", paddle.to_tensor(10, place=paddle.CPUPlace()), TypeError, "tokens_per_expert"),
        ("tokens", np.zeros((10, HIDDEN + 1), "float32"), ValueError, "tokens must have shape"),
        ("tokens", np.zeros((2, 5, HIDDEN), "float32"), ValueError, "tokens must have shape"),
        ("tokens", np.zeros((10, HIDDEN), "float64"), ValueError, "tokens must have the weights' dtype"),
        ("tokens", np.zeros((10, HIDDEN), "uint16"), ValueError, "tokens must have the weights' dtype"),
        ("tokens", None, TypeError, "tokens must be a paddle.Tensor, but is NoneType"),
        ("probs", np.zeros(9, "float32"), ValueError, "unzipped_probs must have shape"),
        ("probs", np.zeros((10, 2), "float32"), ValueError, "unzipped_probs must have shape"),
        ("probs", np.zeros(10, "float64"), ValueError, "unzipped_probs must have dtype float32"),
        ("probs", [0.5] * 10, TypeError, "unzipped_probs must be a paddle.Tensor, but is list"),
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_wrong_calls(name, value, error, words, recorded):
    layer = make_layer()
    arguments = {
        each: tensor_of(given, "cpu") if each != "counts" and isinstance(given, np.ndarray) else given
        for each, given in GOOD.items()
    }
    if isinstance(value, np.ndarray) and name != "counts":
        value = paddle.to_tensor(value, dtype="bfloat16" if value.dtype == np.uint16 else None, place=paddle.CPUPlace())
    arguments[name] = value
    with paddle.set_grad_enabled(recorded), pytest.raises(error, match=words):
        layer(*arguments.values())


def test_wrong_weights():
    for dtypes in (("float64", "float64"), ("float32", "bfloat16")):
        layer, arrays = make_layer(), make_arrays()
        for name, dtype in zip(("up_gate_proj", "down_proj"), dtypes):
            setattr(layer, name, layer.create_parameter(getattr(layer, name).shape, dtype=dtype))
        with pytest.raises(ValueError, match="the weights must both be float32 or both bfloat16"):
            layer(fp32(arrays["tokens"]), fp32(arrays["probs"]), ROUTINGS[0])
