"""Training with main_grad: the norm weight's gradient is added up in FP32, and its backward hooks run."""

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import array_of, backward_into, tensor_of
from paddle_gated_ops import testing
from paddle_gated_ops.testing import from_bf16_bits, reference

EPS = 1e-5


def parameter(bits):
    """A BF16 Parameter of these bits, on the CPU."""
    values = from_bf16_bits(bits).astype("float32")
    weight = paddle.create_parameter(
        [128], "bfloat16", default_initializer=paddle.nn.initializer.Assign(values)
    )
    np.testing.assert_array_equal(array_of(weight.detach()), bits)
    return weight


@pytest.fixture
def batches():
    """Micro-batches of different sizes, with one weight."""
    batches = [testing.rmsnorm_silu_gate_inputs(rows, seed=rows) for rows in (40, 0, 1, 700, 40)]
    for batch in batches:
        batch["weight"] = batches[0]["weight"]
    return batches


@pytest.fixture
def weight(batches):
    paddle.set_device("cpu")
    return parameter(batches[0]["weight"])


def step(weight, batch):
    """Forward and backward of a micro-batch; the gradients of x and z."""
    x, z = tensor_of(batch["x"], "cpu"), tensor_of(batch["z"], "cpu")
    x.stop_gradient = z.stop_gradient = False
    backward_into(F.cake_rmsnorm_silu_gate(x, z, weight, EPS), tensor_of(batch["grad_out"], "cpu"))
    return array_of(x.grad), array_of(z.grad)


def test_several_micro_batches(weight, batches):
    weight.main_grad = tensor_of(np.zeros(128, np.float32), "cpu")
    main_grad, total, bound = weight.main_grad, np.zeros(128), np.zeros(128)
    for batch in batches:
        before = array_of(main_grad).copy()
        grad_x, grad_z = step(weight, batch)
        assert weight.grad is None
        outputs = {"grad_x": grad_x, "grad_z": grad_z, "grad_weight": array_of(main_grad)}
        testing.assert_rmsnorm_silu_gate_bwd(batch, outputs, EPS, initial_grad_weight=before)
        exact = reference.cake_rmsnorm_silu_gate_train_backward(**batch, eps=EPS)
        total = total + exact.grad_weight
        bound = bound + testing.promise3_bound(total, exact.magnitudes["grad_weight"], "float32")
    assert weight.main_grad is main_grad
    assert (np.abs(array_of(main_grad) - total) <= bound).all()
    assert (np.abs(total) > 100 * bound).all()  # another sum would show


def test_it_adds_to_what_is_there(weight, batches):
    # Too small for BF16 beside the gradient, and kept all the same: nothing was rounded to BF16 on the way.
    for start in (0.0, 1000.0):
        weight.main_grad = tensor_of(np.full(128, start, np.float32), "cpu")
        step(weight, batches[0])
        exact = reference.cake_rmsnorm_silu_gate_train_backward(**batches[0], eps=EPS)
        value = exact.grad_weight + start
        bound = testing.promise3_bound(value, exact.magnitudes["grad_weight"], "float32")
        assert (np.abs(array_of(weight.main_grad) - value) <= bound).all()


def test_a_strided_main_grad(weight, batches):
    view, base = testing.strided_view(np.zeros(128, np.float32), "step2", "cpu")
    weight.main_grad = view
    step(weight, batches[0])
    contiguous = parameter(batches[0]["weight"])
    contiguous.main_grad = tensor_of(np.zeros(128, np.float32), "cpu")
    step(contiguous, batches[0])
    np.testing.assert_array_equal(testing.read_view(view, base), array_of(contiguous.main_grad))


@pytest.mark.parametrize("none", [True, False])
def test_without_main_grad_the_gradient_is_returned(weight, batches, none):
    if none:
        weight.main_grad = None  # as Paddle's own trainers have it before the first micro-batch
    step(weight, batches[0])
    exact = F.cake_rmsnorm_silu_gate_train_backward(
        **{name: tensor_of(array, "cpu") for name, array in batches[0].items()}, eps=EPS
    )[2]
    np.testing.assert_array_equal(array_of(weight.grad), array_of(exact))


def test_main_grad_is_looked_for_when_the_backward_runs(weight, batches):
    batch = batches[0]
    x, z = tensor_of(batch["x"], "cpu"), tensor_of(batch["z"], "cpu")
    output = F.cake_rmsnorm_silu_gate(x, z, weight, EPS)
    weight.main_grad = tensor_of(np.zeros(128, np.float32), "cpu")
    backward_into(output, tensor_of(batch["grad_out"], "cpu"))
    assert weight.grad is None and array_of(weight.main_grad).all()


def test_a_weight_that_wants_no_gradient_leaves_main_grad_alone(weight, batches):
    weight.main_grad = tensor_of(np.full(128, 7, np.float32), "cpu")
    weight.stop_gradient = True
    step(weight, batches[0])
    assert (array_of(weight.main_grad) == 7).all() and weight.main_grad.inplace_version == 0


@pytest.mark.parametrize("wrong", [np.zeros(127, np.float32), np.zeros((1, 128), np.float32), np.zeros(128, np.uint16)])
def test_a_wrong_main_grad(weight, batches, wrong):
    weight.main_grad = tensor_of(wrong, "cpu")
    with pytest.raises((ValueError, OSError), match="ValueError.*: main_grad of weight must be a float32 Tensor of"):
        step(weight, batches[0])
    assert not array_of(weight.main_grad).any()


def test_a_main_grad_that_is_no_tensor(weight, batches):
    weight.main_grad = np.zeros(128, np.float32)
    with pytest.raises((ValueError, OSError), match="ValueError.*: main_grad of weight must be .* but is ndarray"):
        step(weight, batches[0])


# ---- Hooks


def test_backward_hooks_run_once(weight, batches):
    seen = []
    weight._register_backward_hook(lambda *_: seen.append(array_of(weight.main_grad).copy()))
    weight.main_grad = tensor_of(np.zeros(128, np.float32), "cpu")
    for count, batch in enumerate(batches, 1):
        step(weight, batch)
        assert len(seen) == count
        np.testing.assert_array_equal(seen[-1], array_of(weight.main_grad))  # it is complete when the hook runs


def test_backward_hooks_run_once_where_the_weight_is_used_twice(weight, batches):
    seen = []
    weight._register_backward_hook(lambda *_: seen.append(array_of(weight.main_grad).copy()))
    weight.main_grad = tensor_of(np.zeros(128, np.float32), "cpu")
    z, x = tensor_of(batches[0]["z"], "cpu"), tensor_of(batches[0]["x"], "cpu")
    output = F.cake_rmsnorm_silu_gate(F.cake_rmsnorm_silu_gate(x, z, weight, EPS), z, weight, EPS)
    backward_into(output, tensor_of(batches[0]["grad_out"], "cpu"))
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], array_of(weight.main_grad))


@pytest.mark.filterwarnings("ignore")
def test_paddles_mix_precision_layer(batches):
    """The trainer's own way: the first micro-batch makes main_grad from the returned gradient, the others go into it."""
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

    class Norm(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.weight = parameter(batches[0]["weight"])

        def forward(self, x, z):
            return F.cake_rmsnorm_silu_gate(x, z, self.weight, EPS)

    paddle.set_device("cpu")
    norm = Norm()
    model = MixPrecisionLayer(norm, dtype="bfloat16")
    total = np.zeros(128)
    bound = np.zeros(128)
    for index, batch in enumerate((batches[0], batches[2], batches[3])):
        x, z = tensor_of(batch["x"], "cpu"), tensor_of(batch["z"], "cpu")
        backward_into(model(x, z), tensor_of(batch["grad_out"], "cpu"))
        exact = reference.cake_rmsnorm_silu_gate_train_backward(**batch, eps=EPS)
        total = total + exact.grad_weight
        rounded_to = "float32" if index else "bfloat16"
        bound = bound + testing.promise3_bound(total, exact.magnitudes["grad_weight"], rounded_to)
    assert norm.weight.grad is None
    assert "float32" in str(norm.weight.main_grad.dtype).lower() or "FP32" in str(norm.weight.main_grad.dtype)
    assert (np.abs(array_of(norm.weight.main_grad) - total) <= bound).all()
