"""RMSNormSiLUGate: the function's bits, as a layer of Paddle's."""

import itertools

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

from calls import RMSNORM_INPUTS, array_of, raw, tensor_of
from paddle_gated_ops import _amp, testing
from paddle_gated_ops.incubate.nn import RMSNormSiLUGate
from paddle_gated_ops.incubate.nn import functional as F
from paddle_gated_ops.testing import reference

SOME = [combination for combination in itertools.product([True, False], repeat=3) if any(combination)]
NEEDS_CASTS = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


@pytest.fixture
def default_dtype():
    before = paddle.get_default_dtype()
    yield paddle.set_default_dtype
    paddle.set_default_dtype(before)


def make_layer(bits, place, dtype="bfloat16", epsilon=1e-6):
    """A layer whose weight has these bits."""
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        layer = RMSNormSiLUGate(epsilon=epsilon)
    finally:
        paddle.set_default_dtype(before)
    layer.weight.set_value(bits if dtype == "bfloat16" else testing.from_bf16_bits(bits).astype("float32"))
    assert str(place).split(":")[0] in str(layer.weight.place)
    return layer


def backward(output, inputs, place):
    paddle.autograd.backward([output], [tensor_of(inputs["grad_out"], place)])


def expected_gradients(inputs, place, grad_weight=None, eps=1e-6):
    """By name: what the backward op returns, with the weight's gradient into ``grad_weight``."""
    tensors = [tensor_of(inputs[name], place) for name in RMSNORM_INPUTS]
    grads = F.cake_rmsnorm_silu_gate_train_backward(*tensors, eps, grad_weight=grad_weight)
    return dict(zip(("x", "z", "weight"), grads))


def assert_same(got, expected, message=""):
    np.testing.assert_array_equal(raw(array_of(got)), raw(array_of(expected)), err_msg=message)


@pytest.mark.parametrize("wanted", SOME)
def test_forward_and_gradients_are_the_functions(place, wanted):
    inputs = testing.rmsnorm_silu_gate_inputs((4, 7), seed=2)
    layer = make_layer(inputs["weight"], place)
    x, z = (tensor_of(inputs[name], place) for name in ("x", "z"))
    tensors = {"x": x, "z": z, "weight": layer.weight}
    for tensor, want in zip(tensors.values(), wanted):
        tensor.stop_gradient = not want
    output = layer(x, z)
    weight = tensor_of(inputs["weight"], place)
    assert_same(output, F.cake_rmsnorm_silu_gate_train_forward(x.detach(), z.detach(), weight))
    backward(output, inputs, place)
    expected = expected_gradients(inputs, place)
    for (name, tensor), want in zip(tensors.items(), wanted):
        assert (tensor.grad is not None) == want, name
        if want:
            assert_same(tensor.grad, expected[name], name)


@pytest.mark.parametrize("wanted", SOME)
def test_fp32_weight_has_an_unrounded_gradient(wanted):
    inputs = testing.rmsnorm_silu_gate_inputs((40,), seed=3)
    layer = make_layer(inputs["weight"], "cpu", "float32", epsilon=1e-3)
    x, z = (tensor_of(inputs[name], "cpu") for name in ("x", "z"))
    tensors = {"x": x, "z": z, "weight": layer.weight}
    for tensor, want in zip(tensors.values(), wanted):
        tensor.stop_gradient = not want
    output = layer(x, z)
    assert str(output.dtype).endswith("bfloat16")
    backward(output, inputs, "cpu")
    expected = expected_gradients(inputs, "cpu", paddle.empty([128], "float32"), eps=1e-3)
    for (name, tensor), want in zip(tensors.items(), wanted):
        assert (tensor.grad is not None) == want, name
        if want:
            assert_same(tensor.grad, expected[name], name)
    if wanted[2]:
        outputs = {"grad_x": expected["x"], "grad_z": expected["z"], "grad_weight": layer.weight.grad}
        testing.assert_rmsnorm_silu_gate_bwd(inputs, {k: array_of(v) for k, v in outputs.items()}, eps=1e-3)


@NEEDS_CASTS
def test_main_grad_over_micro_batches(dtype):
    inputs = [testing.rmsnorm_silu_gate_inputs((33,), seed=seed) for seed in range(4)]
    layer = make_layer(inputs[0]["weight"], "cpu", dtype)
    layer.weight.main_grad = paddle.zeros([128], "bfloat16")
    with pytest.raises((ValueError, OSError), match="ValueError.*: main_grad of weight must be a float32 Tensor"):
        x, z = (tensor_of(inputs[0][name], "cpu") for name in ("x", "z"))
        backward(layer(x, z), inputs[0], "cpu")
    layer.weight.main_grad = main_grad = paddle.full([128], 3.0)
    hooks = []
    layer.weight._register_backward_hook(lambda: hooks.append(True))
    true, terms = np.full(128, 3.0), np.zeros(128)
    for count, each in enumerate(inputs, 1):
        each["weight"] = inputs[0]["weight"]
        x, z = (tensor_of(each[name], "cpu") for name in ("x", "z"))
        x.stop_gradient = False
        backward(layer(x, z), each, "cpu")
        assert_same(x.grad, expected_gradients(each, "cpu")["x"])
        assert layer.weight.grad is None and len(hooks) == count
        one = reference.cake_rmsnorm_silu_gate_train_backward(**each, eps=1e-6)
        true += one.grad_weight
        terms += one.magnitudes["grad_weight"].terms
    assert layer.weight.main_grad is main_grad
    # Each batch's sum is within 2^-20 of its terms, and four results are rounded to FP32.
    bound = 2.0**-20 * terms + 4 * 2.0**-24 * np.abs(true).max()
    assert (np.abs(main_grad.numpy() - true) <= bound).all()


@NEEDS_CASTS
def test_gate_is_read_in_place_from_a_packed_projection(dtype):
    inputs = testing.rmsnorm_silu_gate_inputs((6, 4), seed=5)
    layer = make_layer(inputs["weight"], "cpu", dtype)
    packed = np.zeros((6, 4, 512), "uint16")
    packed[..., 256:384] = inputs["z"]
    packed = testing.bf16_tensor(packed, "cpu", stop_gradient=False)
    output = layer(tensor_of(inputs["x"], "cpu"), packed[:, :, 256:384])
    backward(output, inputs, "cpu")
    assert_same(packed.grad[:, :, 256:384].contiguous(), expected_gradients(inputs, "cpu")["z"])


@NEEDS_CASTS
def test_no_grad_leaves_no_node(dtype):
    inputs = testing.rmsnorm_silu_gate_inputs((5,))
    layer = make_layer(inputs["weight"], "cpu", dtype)
    x, z = (tensor_of(inputs[name], "cpu") for name in ("x", "z"))
    expected = layer(x, z)
    assert not expected.stop_gradient
    with paddle.no_grad():
        output = layer(x, z)
    assert output.stop_gradient and output.grad_fn is None
    assert_same(output, expected)


@NEEDS_CASTS
def test_create_graph_is_refused(dtype):
    inputs = testing.rmsnorm_silu_gate_inputs((5,))
    layer = make_layer(inputs["weight"], "cpu", dtype)
    x, z = (tensor_of(inputs[name], "cpu") for name in ("x", "z"))
    x.stop_gradient = False
    with pytest.raises(NotImplementedError, match="create_graph=False"):
        paddle.grad([layer(x, z)], [x], create_graph=True)


@NEEDS_CASTS
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute(dtype, use_reentrant):
    inputs = testing.rmsnorm_silu_gate_inputs((9,), seed=6)
    results = []
    for call in (
        lambda layer, *tensors: layer(*tensors),
        lambda layer, *tensors: recompute(layer, *tensors, use_reentrant=use_reentrant, preserve_rng_state=False),
    ):
        layer = make_layer(inputs["weight"], "cpu", dtype)
        x, z = (tensor_of(inputs[name], "cpu") for name in ("x", "z"))
        x.stop_gradient = z.stop_gradient = False
        output = call(layer, x, z)
        backward(output, inputs, "cpu")
        results.append([output, x.grad, z.grad, layer.weight.grad])
    for got, expected in zip(*results):
        assert_same(got, expected)


@NEEDS_CASTS
@pytest.mark.parametrize("full_graph", [True, False])
def test_to_static(dtype, full_graph):
    inputs = testing.rmsnorm_silu_gate_inputs((2, 9), seed=7)
    layer = make_layer(inputs["weight"], "cpu", dtype)
    graph = paddle.jit.to_static(make_layer(inputs["weight"], "cpu", dtype), full_graph=full_graph)
    results = []
    for each in (layer, graph):
        x, z = (tensor_of(inputs[name], "cpu") for name in ("x", "z"))
        x.stop_gradient = z.stop_gradient = False
        output = each(x, z)
        backward(output, inputs, "cpu")
        results.append({"y": output, "x": x.grad, "z": z.grad, "weight": each.weight.grad})
    eager, static = results
    for name in eager:  # a FP32 weight's gradient is unrounded in both
        assert_same(static[name], eager[name], name)


@NEEDS_CASTS
def test_auto_cast(dtype, monkeypatch):
    inputs = testing.rmsnorm_silu_gate_inputs((5,), seed=8)
    layer = make_layer(inputs["weight"], "cpu", dtype)
    x, z = (testing.float_tensor(testing.from_bf16_bits(inputs[name]), "cpu", stop_gradient=False) for name in "xz")
    monkeypatch.setattr(_amp, "autocast_dtype", lambda: "bfloat16")
    output = layer(x, z)
    backward(output, inputs, "cpu")
    expected = expected_gradients(inputs, "cpu")
    for tensor, name in ((x, "x"), (z, "z")):
        assert str(tensor.grad.dtype).endswith("float32")
        np.testing.assert_array_equal(tensor.grad.numpy(), testing.from_bf16_bits(array_of(expected[name])))
    monkeypatch.setattr(_amp, "autocast_dtype", lambda: "float16")
    with pytest.raises(ValueError, match="auto_cast.*float16"):
        layer(x, z)


def test_weight_is_initialized_as_paddles_layers_are(default_dtype):
    layer = RMSNormSiLUGate()
    assert str(layer.weight.dtype).endswith("float32") and (layer.weight.numpy() == 1).all()
    assert not layer.weight.stop_gradient
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    default_dtype("bfloat16")
    layer = RMSNormSiLUGate(128, weight_attr=paddle.ParamAttr(name="gate_norm", trainable=False))
    assert str(layer.weight.dtype).endswith("bfloat16") and (layer.weight.numpy() == 0x3F80).all()
    assert layer.weight.name == "gate_norm" and layer.weight.stop_gradient
    default_dtype("float32")
    attr = paddle.ParamAttr(initializer=paddle.nn.initializer.Normal())
    draws = []
    for seed in (1, 1, 2):
        paddle.seed(seed)
        draws.append(RMSNormSiLUGate(weight_attr=attr).weight.numpy())
    assert np.array_equal(draws[0], draws[1]) and not np.array_equal(draws[0], draws[2])


def test_to_and_state_dict(tmp_path):
    inputs = testing.rmsnorm_silu_gate_inputs((5,))
    layer = make_layer(inputs["weight"], "cpu", "float32")
    x, z = (tensor_of(inputs[name], "cpu") for name in ("x", "z"))
    expected = layer(x, z)
    assert list(layer.state_dict()) == ["weight"]
    paddle.save(layer.state_dict(), str(tmp_path / "norm.pdparams"))
    loaded = RMSNormSiLUGate()
    missing = loaded.set_state_dict(paddle.load(str(tmp_path / "norm.pdparams")))
    assert not any(missing or [])
    assert_same(loaded(x, z), expected)
    loaded.to(dtype="bfloat16")
    assert str(loaded.weight.dtype).endswith("bfloat16")
    assert_same(loaded(x, z), expected)
    loaded.to(dtype="float16")
    with pytest.raises(ValueError, match="weight must have dtype bfloat16"):
        loaded(x, z)


def test_extra_repr():
    text = repr(RMSNormSiLUGate(epsilon=1e-5))
    assert text.startswith("RMSNormSiLUGate(hidden_size=128, epsilon=1e-05, dtype=") and "float32" in text


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (dict(hidden_size=64), ValueError, "hidden_size must be 128, but is 64"),
        (dict(hidden_size="128"), TypeError, "hidden_size must be an int, but is str"),
        (dict(hidden_size=128.0), TypeError, "hidden_size must be an int, but is float"),
        (dict(epsilon=-1e-6), ValueError, "^RMSNormSiLUGate: epsilon must be"),
        (dict(epsilon=float("nan")), ValueError, "^RMSNormSiLUGate: epsilon must be"),
        (dict(epsilon="small"), TypeError, "^RMSNormSiLUGate: epsilon must be"),
        (dict(epsilon=None), TypeError, "^RMSNormSiLUGate: epsilon must be"),
        (dict(weight_attr=False), ValueError, "^RMSNormSiLUGate: weight_attr must not be False"),
        (dict(weight_attr=3), TypeError, "^RMSNormSiLUGate: weight_attr must be a ParamAttr.* but is int"),
        (dict(weight_attr=[None]), TypeError, "^RMSNormSiLUGate: weight_attr must be a ParamAttr.* but is list"),
    ],
)
def test_wrong_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        RMSNormSiLUGate(**arguments)


@NEEDS_CASTS
def test_wrong_calls(dtype):
    inputs = testing.rmsnorm_silu_gate_inputs((5,))
    layer = make_layer(inputs["weight"], "cpu", dtype)
    x, z = (tensor_of(inputs[name], "cpu") for name in ("x", "z"))
    with pytest.raises(ValueError, match="x must have dtype bfloat16"):
        layer(x.astype("float32"), z)
    with pytest.raises(ValueError, match="z must have"):
        layer(x, z[:3])
    with pytest.raises(TypeError, match="z must be a paddle.Tensor"):
        layer(x, None)
