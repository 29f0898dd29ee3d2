"""paddle.DataParallel over two processes: the gradients are the averages of the processes' own, as one process has them."""

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from paddle_gated_ops.incubate.nn import RMSNormSiLUGate, WeightedSwiGLUExperts
from processes import PROCESSES, assert_passed, collect, work

ROWS, HIDDEN = 10, 128  # rows of each process


class WithFunctions(paddle.nn.Layer):
    """Both differentiable functions, with casts at their borders."""

    def __init__(self):
        super().__init__()
        self.up_gate = paddle.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.router = paddle.nn.Linear(HIDDEN, 1)
        self.weight = self.create_parameter([HIDDEN], default_initializer=paddle.nn.initializer.Normal(1.0))

    def forward(self, x):
        probs = paddle.nn.functional.sigmoid(self.router(x))
        o2_s = F.fused_swiglu_weighted(self.up_gate(x).astype("bfloat16"), probs)
        y = F.cake_rmsnorm_silu_gate(o2_s, x.astype("bfloat16"), self.weight.astype("bfloat16"))
        return y.astype("float32")


class WithLayers(paddle.nn.Layer):
    """Both layers. The second of the three experts has no tokens in any process, which is no reason to wait for it."""

    def __init__(self):
        super().__init__()
        self.router = paddle.nn.Linear(HIDDEN, 1)
        self.experts = WeightedSwiGLUExperts(3, HIDDEN, 24)
        self.norm = RMSNormSiLUGate(HIDDEN)

    def forward(self, x):
        probs = paddle.nn.functional.sigmoid(self.router(x))
        out = self.experts(x, probs, [4, 0, ROWS - 4])
        return self.norm(out.astype("bfloat16"), x.astype("bfloat16")).astype("float32")


def batch(rank):
    generator = np.random.default_rng(rank)
    return [paddle.to_tensor(generator.standard_normal([ROWS, HIDDEN], dtype=np.float32)) for _ in range(2)]


def gradients(model, call, rank):
    """The parameters' gradients, by name, of a loss on the rank's own batch."""
    x, wanted = batch(rank)
    (call(x) * wanted).sum().backward()
    arrays = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    model.clear_gradients()
    return arrays


def assert_averages(make, rank):
    paddle.seed(3)
    model = make()
    parallel = paddle.DataParallel(model)
    for step in range(2):  # a second one, since the first has buckets of its own
        parts = [gradients(model, model, other + 7 * step) for other in range(PROCESSES)]
        averages = gradients(model, parallel, rank + 7 * step)
        for name, average in averages.items():
            # Halving is exact, and so the only rounding is the sum's.
            expected = (parts[0][name] + parts[1][name]) / 2
            assert np.any(parts[0][name] != parts[1][name]), name
            np.testing.assert_array_equal(average, expected, err_msg=name)


def check_functions(rank):
    assert_averages(WithFunctions, rank)


def check_layers(rank):
    assert_averages(WithLayers, rank)


CHECKS = collect(globals())


@pytest.mark.parametrize("name", CHECKS)
def test_gradients_are_averages(name):
    assert_passed(__file__, name)


if __name__ == "__main__":
    work(CHECKS)
