"""A model that holds both forwards, for test_export.py: a file of its own, as to_static reads its source."""

import numpy as np
import paddle
from paddle.static import InputSpec

import paddle_gated_ops.incubate.nn.functional as F
from paddle_gated_ops.testing import from_bf16_bits, to_bf16_bits


def numbers(generator, low, high, shape):
    """Random FP32 values that BF16 holds exactly."""
    return from_bf16_bits(to_bf16_bits(generator.uniform(low, high, shape))).astype("float32")


class Model(paddle.nn.Layer):
    """Products with FP32 weights that are BF16 numbers: no cast rounds, as Paddle 2.6 truncates in some executors alone."""

    def __init__(self):
        super().__init__()
        generator = np.random.default_rng(0)

        def parameter(*shape):
            values = numbers(generator, 0.5, 1.5, shape)
            return self.create_parameter(shape, default_initializer=paddle.nn.initializer.Assign(values))

        self.scale, self.norm = parameter(1, 256), parameter(128)
        self.scale.set_value(2.0 ** generator.integers(-1, 2, (1, 256)).astype("float32"))

    def forward(self, o1, probs, z):
        hidden = F.fused_swiglu_weighted((o1 * self.scale).astype("bfloat16"), probs)
        hidden = F.fused_swiglu_weighted(paddle.concat([hidden, hidden], -1), probs, clamp_value=1.5)
        weight = self.norm.astype("bfloat16")
        return F.cake_rmsnorm_silu_gate(hidden, z.astype("bfloat16"), weight, 1e-3).astype("float32")


def save(path, row_counts):
    """Saves the model, and what it makes of some inputs: <path>.<rows>.npz."""
    model = Model()
    model.eval()
    for rows in row_counts:
        generator = np.random.default_rng(rows)
        shapes = {"o1": (rows, 256), "probs": (rows,), "z": (rows, 128)}
        inputs = {name: numbers(generator, -2, 2, shape) for name, shape in shapes.items()}
        np.savez(f"{path}.{rows}.npz", y=model(*map(paddle.to_tensor, inputs.values())).numpy(), **inputs)
    specs = [InputSpec([-1, *shape[1:]], "float32", name) for name, shape in shapes.items()]
    paddle.jit.save(model, path, input_spec=specs)
