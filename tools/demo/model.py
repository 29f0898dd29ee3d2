"""A small mixture-of-experts classifier, put together as the MoE layers of ERNIE 4.5 are."""

import paddle
import paddle.nn.functional as F
from paddle import nn

PIXELS = 64
CLASSES = 10
HIDDEN = 128  # the gated RMSNorm is over 128
INTERMEDIATE = 256
EXPERTS = 8
TOP_K = 2
EPS = 1e-6


class MoELayer(nn.Layer):
    """Sends each token to the TOP_K experts the router gives the highest probabilities, and sums what they return.

    Args:
        ops (module): ``fused`` or ``unfused``.
    """

    def __init__(self, ops):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias_attr=False)
        self.experts = ops.Experts(EXPERTS, HIDDEN, INTERMEDIATE)

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
        out = self.experts(rows, row_probs, loads.tolist())

        # Un-permute, and sum each token's rows, which the experts have weighted already.
        out = paddle.gather(out, paddle.argsort(order)).reshape([-1, TOP_K, HIDDEN]).sum(axis=1)
        share = loads.astype("float32") / chosen.shape[0]
        return out, EXPERTS * (share * router_probs.mean(axis=0)).sum()


class MoEClassifier(nn.Layer):
    """Input projection, experts with a residual connection, gated RMSNorm, classifier head.

    Args:
        ops (module): ``fused`` or ``unfused``: whose experts and norm.
    """

    def __init__(self, ops):
        super().__init__()
        self.input_proj = nn.Linear(PIXELS, HIDDEN)
        self.moe = MoELayer(ops)
        self.gate_proj = nn.Linear(HIDDEN, HIDDEN)
        self.norm = ops.GatedRMSNorm(HIDDEN, EPS)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, images):
        """From images [T, PIXELS] to logits [T, CLASSES], and the experts' balance loss (a scalar)."""
        tokens = self.input_proj(images)
        out, balance = self.moe(tokens)
        return self.head(self.norm(tokens + out, self.gate_proj(tokens))), balance
