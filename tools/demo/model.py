"""A small mixture-of-experts classifier, put together as the MoE layers of ERNIE 4.5 are."""

import paddle
import paddle.nn.functional as F
from grouped import grouped_matmul
from paddle import nn

PIXELS = 64
CLASSES = 10
HIDDEN = 128  # the gated RMSNorm is over 128
INTERMEDIATE = 256
EXPERTS = 8
TOP_K = 2
EPS = 1e-6


def _normal(fan_in):
    return nn.initializer.Normal(std=fan_in**-0.5)


class Experts(nn.Layer):
    """Sends each token to the TOP_K experts the router gives the highest probabilities, and sums what they return.

    Args:
        ops (module): ``fused`` or ``unfused``.
    """

    def __init__(self, ops):
        super().__init__()
        self.ops = ops
        self.router = nn.Linear(HIDDEN, EXPERTS, bias_attr=False)
        self.up_gate_proj = self.create_parameter(
            [EXPERTS, HIDDEN, 2 * INTERMEDIATE], default_initializer=_normal(HIDDEN)
        )
        self.down_proj = self.create_parameter(
            [EXPERTS, INTERMEDIATE, HIDDEN], default_initializer=_normal(INTERMEDIATE)
        )

    def forward(self, tokens):
        """From tokens [T, HIDDEN] to the same shape, and the loss (a scalar) that evens out the experts' loads."""
        router_probs = F.softmax(self.router(tokens), axis=-1)  # [T, EXPERTS], FP32
        probs, experts = paddle.topk(router_probs, TOP_K, axis=-1)  # [T, TOP_K]

        # Permute: a row for each choice of each token, [T * TOP_K, HIDDEN], sorted by expert.
        chosen = experts.flatten()
        order = paddle.argsort(chosen)
        rows = paddle.gather(tokens, order // TOP_K)
        row_probs = paddle.gather(probs.reshape([-1, 1]), order)
        loads = paddle.bincount(chosen, minlength=EXPERTS)
        counts = loads.tolist()

        o1 = grouped_matmul(rows, self.up_gate_proj, counts)
        out = self.ops.weighted_swiglu_down(o1, row_probs, self.down_proj, counts)

        # Un-permute, and sum each token's rows, which the experts have weighted already.
        out = paddle.gather(out, paddle.argsort(order)).reshape([-1, TOP_K, HIDDEN]).sum(axis=1)
        share = loads.astype("float32") / chosen.shape[0]
        return out, EXPERTS * (share * router_probs.mean(axis=0)).sum()


class MoEClassifier(nn.Layer):
    """Input projection, experts with a residual connection, gated RMSNorm, classifier head.

    Args:
        ops (module): ``fused`` or ``unfused``: who computes weighted SwiGLU and gated RMSNorm.
    """

    def __init__(self, ops):
        super().__init__()
        self.ops = ops
        self.input_proj = nn.Linear(PIXELS, HIDDEN)
        self.experts = Experts(ops)
        self.gate_proj = nn.Linear(HIDDEN, HIDDEN)
        self.norm_weight = self.create_parameter([HIDDEN], default_initializer=nn.initializer.Constant(1.0))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, images):
        """From images [T, PIXELS] to logits [T, CLASSES], and the experts' balance loss (a scalar)."""
        tokens = self.input_proj(images)
        out, balance = self.experts(tokens)
        normed = self.ops.gated_rms_norm(tokens + out, self.gate_proj(tokens), self.norm_weight, EPS)
        return self.head(normed), balance
