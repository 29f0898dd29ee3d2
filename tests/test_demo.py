"""The demo (tools/demo): its parts compute what they say, its training is repeatable, its conditions can fail."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_gated_ops import testing
from paddle_gated_ops._library import C
from paddle_gated_ops.testing import reference

for package in ("sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(package, reason="the demo's packages are not installed (the extra 'demo')")

DEMO = Path(__file__).resolve().parents[1] / "tools" / "demo"
sys.path.insert(0, str(DEMO))
import digits  # noqa: E402
import fused  # noqa: E402
import grouped  # noqa: E402
import model  # noqa: E402
import report  # noqa: E402
import training  # noqa: E402
import unfused  # noqa: E402
from gradient_check import GradientCheck  # noqa: E402

ROUTINGS = ([3, 0, 4, 0], [0, 0, 0, 7], [7, 0, 0, 0], [1, 2, 3, 1])  # rows of each of four experts

# Norm of the error to the norm of the result: FP32's 2^-24 a step, and up to 400 steps in a sum here.
FP32_NOISE = 400 * 2.0**-24


class NoBar:
    def update(self):
        pass

    def set_postfix_str(self, text, refresh):
        pass


def tensor(array):
    return testing.float_tensor(array, "cpu", stop_gradient=False)


def relative_error(got, expected):
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.fixture(autouse=True)
def on_cpu():
    before = paddle.get_device()
    paddle.set_device("cpu")
    yield
    paddle.set_device(before)


@pytest.fixture(scope="module")
def few_digits():
    data = digits.load(0)
    return data._replace(train_images=data.train_images[:300], train_labels=data.train_labels[:300])


# The parts


@pytest.mark.parametrize("counts", ROUTINGS)
def test_grouped_products_and_gradients(counts):
    random = np.random.default_rng(0)
    rows, weights, grad = (random.integers(-8, 9, shape) for shape in ((7, 5), (4, 5, 3), (7, 3)))  # exact in FP32
    owner = np.repeat(np.arange(4), counts)
    inputs = tensor(rows), tensor(weights)
    out = grouped.grouped_matmul(*inputs, counts)
    paddle.autograd.backward([out], [tensor(grad)])

    expected_weights = np.zeros(weights.shape)
    np.add.at(expected_weights, owner, np.einsum("ri,ro->rio", rows, grad))
    assert np.array_equal(out.numpy(), np.einsum("ri,rio->ro", rows, weights[owner]))
    assert np.array_equal(inputs[0].grad.numpy(), np.einsum("ro,rio->ri", grad, weights[owner]))
    assert np.array_equal(inputs[1].grad.numpy(), expected_weights)


@pytest.mark.parametrize("counts", ROUTINGS)
def test_unfused_experts_against_float64(counts):
    inputs = testing.swiglu_weighted_inputs((7,), 16)
    o1, do2_s = (testing.from_bf16_bits(inputs[name]) for name in ("o1", "do2_s"))
    probs = inputs["unzipped_probs"][:, None]
    owner = np.repeat(np.arange(4), counts)
    layer = unfused.Experts(4, 32, 16)
    layer.up_gate_proj.set_value(np.stack([np.eye(32, dtype="float32")] * 4))
    layer.down_proj.set_value(np.stack([np.eye(16, 32, dtype="float32")] * 4))
    grad = do2_s @ np.eye(16, 32)
    tensors = tensor(o1), tensor(probs)
    out = layer(*tensors, counts)
    paddle.autograd.backward([out], [tensor(grad)])

    expected = reference.fused_swiglu_weighted_bwd(inputs["o1"], inputs["do2_s"], probs)
    assert relative_error(out.numpy(), expected.o2_s @ np.eye(16, 32)) < FP32_NOISE
    assert relative_error(tensors[0].grad.numpy(), expected.do1) < FP32_NOISE
    assert relative_error(tensors[1].grad.numpy(), expected.probs_grad) < FP32_NOISE
    for parameter, rows, grads in (
        (layer.up_gate_proj, o1, expected.do1),
        (layer.down_proj, expected.o2_s, grad),
    ):
        expected_weights = np.zeros(parameter.shape)
        np.add.at(expected_weights, owner, np.einsum("ri,ro->rio", rows, grads))
        assert relative_error(parameter.grad.numpy(), expected_weights) < FP32_NOISE


def test_fused_norm_takes_and_gives_fp32():
    inputs = testing.rmsnorm_silu_gate_inputs((3, 5))
    layer = fused.GatedRMSNorm(128, 1e-6)
    layer.weight.set_value(testing.from_bf16_bits(inputs["weight"]).astype("float32"))
    x, z, grad = (tensor(testing.from_bf16_bits(inputs[name])) for name in ("x", "z", "grad_out"))
    out = layer(x, z)
    paddle.autograd.backward([out], [grad])

    expected = reference.rmsnorm_silu_gate(inputs["x"], inputs["z"], inputs["weight"])
    assert testing.error_in_ulps(out.numpy(), expected).max() <= 1
    gradients = {"grad_x": x.grad, "grad_z": z.grad, "grad_weight": layer.weight.grad}
    outputs = {name: each.numpy() for name, each in gradients.items()}
    outputs.update({name: testing.to_bf16_bits(outputs[name]) for name in ("grad_x", "grad_z")})
    testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs)


def test_unfused_norm_against_float64():
    inputs = testing.rmsnorm_silu_gate_inputs((3, 5))
    x, z, weight, grad = (testing.from_bf16_bits(inputs[name]) for name in ("x", "z", "weight", "grad_out"))
    layer = unfused.GatedRMSNorm(128, 1e-6)
    layer.weight.set_value(weight.astype("float32"))
    tensors = tensor(x), tensor(z)
    out = layer(*tensors)
    paddle.autograd.backward([out], [tensor(grad)])

    expected = reference.cake_rmsnorm_silu_gate_train_backward(**inputs, eps=1e-6)
    forward = reference.rmsnorm_silu_gate(inputs["x"], inputs["z"], inputs["weight"])
    assert relative_error(out.numpy(), forward) < FP32_NOISE
    assert relative_error(tensors[0].grad.numpy(), expected.grad_x) < FP32_NOISE
    assert relative_error(tensors[1].grad.numpy(), expected.grad_z) < FP32_NOISE
    assert relative_error(layer.weight.grad.numpy(), expected.grad_weight) < FP32_NOISE


def dense_experts(layer, tokens):
    """What MoELayer.forward returns, token by token in float64."""
    router, up_gate, down = (
        parameter.numpy().astype(np.float64)
        for parameter in (layer.router.weight, layer.experts.up_gate_proj, layer.experts.down_proj)
    )
    out, loads, probs_sum = np.zeros(tokens.shape), np.zeros(model.EXPERTS), np.zeros(model.EXPERTS)
    for i, token in enumerate(tokens):
        logits = token @ router
        probs = np.exp(logits) / np.exp(logits).sum()
        probs_sum += probs
        for expert in np.argsort(-probs)[: model.TOP_K]:
            loads[expert] += 1
            out[i] += reference.swiglu_weighted(token @ up_gate[expert], probs[expert]) @ down[expert]
    return out, loads, model.EXPERTS * (loads / loads.sum()) @ (probs_sum / len(tokens))


# gate, up and o2_s are rounded to BF16, each by 2^-8 at most; what a routing error costs is of order 1.
@pytest.mark.parametrize("ops, noise", [(unfused, FP32_NOISE), (fused, 4 * 2.0**-8)], ids=["unfused", "fused"])
@pytest.mark.parametrize("crowded", [False, True])
def test_experts_layer_is_the_weighted_sum_of_the_chosen(ops, noise, crowded):
    paddle.seed(3)
    layer = model.MoELayer(ops)
    tokens = np.random.default_rng(3).standard_normal((20, model.HIDDEN)).astype(np.float32)
    if crowded:  # every token to experts 2 and 5, none to the others
        router = layer.router.weight.numpy() * 0.01
        router[0] = -3.0
        router[0, [2, 5]] = 3.0
        tokens[:, 0] = 1.0
        layer.router.weight.set_value(router)
    out, balance = layer(tensor(tokens))
    expected, loads, expected_balance = dense_experts(layer, tokens)
    assert relative_error(out.numpy(), expected) < noise
    assert float(balance) == pytest.approx(expected_balance, rel=FP32_NOISE)

    out.sum().backward()
    for parameter in layer.experts.parameters():
        assert np.array_equal(np.abs(parameter.grad.numpy()).sum(axis=(1, 2)) > 0, loads > 0)
    assert np.flatnonzero(loads).tolist() == ([2, 5] if crowded else list(range(8)))


def test_digits_are_split_by_class_and_seed():
    data = digits.load(4)
    assert len(data.train_images) + len(data.test_images) == 1797
    shares = [np.bincount(labels) / len(labels) for labels in (data.train_labels, data.test_labels)]
    assert np.abs(shares[0] - shares[1]).max() < 1 / len(data.test_labels)
    assert data.train_images.mean() == pytest.approx(0, abs=1e-5)
    assert data.train_images.std() == pytest.approx(1, rel=1e-5)
    assert all(np.array_equal(a, b) for a, b in zip(data, digits.load(4)))
    assert not np.array_equal(data.test_labels, digits.load(5).test_labels)


# The training


def test_training_meets_its_gradient_and_loss_conditions_and_is_repeatable(few_digits):
    first, second = (training.train(few_digits, 2, 0, NoBar()) for _ in range(2))
    assert first.gradients.calls == 4  # 2 of 10 steps, both ops
    assert set(first.gradients.worst) == {"do1", "probs_grad", "o2_s", "grad_x", "grad_z", "grad_weight"}
    _, gradients, loss = report.conditions(first)
    assert gradients.met and loss.met
    assert first.fused.losses[1] < first.fused.losses[0]
    assert first.fused.losses == second.fused.losses and first.unfused.losses == second.unfused.losses
    assert first.fused.accuracies == second.fused.accuracies
    assert first.gradients.worst == second.gradients.worst
    assert len(first.fused.step_seconds) == len(first.unfused.step_seconds) == 8


def scale_output(index):
    """1.5 % off: more than an ulp (0.8 %) and than any other bound, too little to see in the loss."""

    def wrong(outputs):
        changed = list(outputs)
        dtype = changed[index].dtype
        changed[index] = (changed[index].astype("float32") * 1.015).astype(dtype)
        return tuple(changed)

    return wrong


@pytest.mark.parametrize(
    "op, index, name",
    [
        ("fused_swiglu_weighted_bwd_out", 0, "do1"),
        ("fused_swiglu_weighted_bwd_out", 1, "probs_grad"),
        ("fused_swiglu_weighted_bwd_out", 2, "o2_s"),
        ("cake_rmsnorm_silu_gate_train_backward", 0, "grad_x"),
        ("cake_rmsnorm_silu_gate_train_backward", 1, "grad_z"),
        ("cake_rmsnorm_silu_gate_train_backward", 2, "grad_weight"),
    ],
)
def test_a_wrong_gradient_is_noticed(few_digits, monkeypatch, op, index, name):
    right, wrong = getattr(C, op), scale_output(index)
    monkeypatch.setattr(C, op, lambda *inputs: wrong(right(*inputs)))
    result = training.train(few_digits, 1, 0, NoBar())
    assert {each for each, error in result.gradients.worst.items() if error > 1} == {name}
    assert not report.conditions(result)[1].met


def test_a_loss_that_strays_is_noticed(few_digits, monkeypatch):
    right = C.fused_swiglu_weighted_bwd_out

    def negated(*inputs):
        do1, probs_grad, o2_s = right(*inputs)
        return (-do1.astype("float32")).astype("bfloat16"), -probs_grad, o2_s

    monkeypatch.setattr(C, "fused_swiglu_weighted_bwd_out", negated)
    result = training.train(few_digits, 2, 0, NoBar())
    assert not report.conditions(result)[2].met


# The conditions


def result_with(accuracy=0.95, error=1.0, ours=(1.0, 0.5), theirs=(1.0, 0.5)):
    gradients = GradientCheck()
    gradients.worst = {} if error is None else {"do1": 0.1, "grad_x": error}
    curves = training.Curve(list(ours), [0.5, accuracy], [0.002]), training.Curve(list(theirs), [0.5, 0.99], [0.004])
    return training.Result(*curves, gradients)


@pytest.mark.parametrize(
    "changes, met",
    [
        (dict(ours=(1.019, 0.491)), [True, True, True]),
        (dict(accuracy=0.949), [False, True, True]),
        (dict(accuracy=math.nan), [False, True, True]),
        (dict(error=1.001), [True, False, True]),
        (dict(error=math.inf), [True, False, True]),
        (dict(error=None), [True, False, True]),
        (dict(ours=(1.021, 0.5)), [True, True, False]),
        (dict(ours=(1, 0.489)), [True, True, False]),
        (dict(ours=(1, math.nan)), [True, True, False]),
        (dict(ours=(math.nan, 0.5)), [True, True, False]),
    ],
)
def test_conditions(changes, met):
    result = result_with(**changes)
    assert [condition.met for condition in report.conditions(result)] == met
    assert report.text(result, 2).count("FAILED") == met.count(False)


def run_main(monkeypatch, picture):
    spec = importlib.util.spec_from_file_location("demo_main", DEMO / "__main__.py")
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    monkeypatch.setattr(sys, "argv", ["demo", "--epochs", "1", "--device", "cpu", "--picture", str(picture)])
    main.main()


def test_exit_status_1_where_nothing_is_learned(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(training, "LEARNING_RATE", 0.0)
    with pytest.raises(SystemExit) as stopped:
        run_main(monkeypatch, tmp_path / "curves.png")
    assert stopped.value.code == 1
    assert "FAILED  test accuracy" in capsys.readouterr().out


def test_report_and_picture(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report, "ACCURACY_AT_LEAST", 0.5)
    run_main(monkeypatch, tmp_path / "curves.png")
    out, bar = capsys.readouterr()
    for expected in ("test accuracy:", "largest gradient error:", "time of a step:", str(tmp_path / "curves.png")):
        assert expected in out
    assert "FAILED" not in out
    assert "22/22" in bar
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
