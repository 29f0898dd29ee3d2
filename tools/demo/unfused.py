"""The two layers of ``fused`` from Paddle's own functions, in FP32 throughout and with Paddle's own gradients.

They take the same arguments and have parameters of the same names and shapes.
"""

import paddle
import paddle.nn.functional as F
from grouped import grouped_matmul
from paddle import nn


class Experts(nn.Layer):
    def __init__(self, num_experts, hidden_size, intermediate_size):
        super().__init__()
        self.up_gate_proj = self.create_parameter([num_experts, hidden_size, 2 * intermediate_size])
        self.down_proj = self.create_parameter([num_experts, intermediate_size, hidden_size])

    def forward(self, tokens, probs, tokens_per_expert):
        gate, up = grouped_matmul(tokens, self.up_gate_proj, tokens_per_expert).chunk(2, axis=-1)
        return grouped_matmul(F.silu(gate) * up * probs, self.down_proj, tokens_per_expert)


class GatedRMSNorm(nn.Layer):
    def __init__(self, hidden_size, epsilon):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([hidden_size], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x, z):
        rstd = paddle.rsqrt(x.square().mean(axis=-1, keepdim=True) + self.epsilon)
        return x * rstd * self.weight * F.silu(z)
