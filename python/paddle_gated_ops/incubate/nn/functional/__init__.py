"""The documented functions, named as in paddle.incubate.nn.functional and flashinfer."""

from .rmsnorm_silu_gate import (
    cake_rmsnorm_silu_gate_train_backward,
    cake_rmsnorm_silu_gate_train_backward_workspace_bytes,
)
from .swiglu_weighted import fused_swiglu_weighted_bwd

__all__ = [
    "cake_rmsnorm_silu_gate_train_backward",
    "cake_rmsnorm_silu_gate_train_backward_workspace_bytes",
    "fused_swiglu_weighted_bwd",
]
