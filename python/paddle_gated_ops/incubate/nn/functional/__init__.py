"""The functions, named as in paddle.incubate.nn.functional and flashinfer."""

from .rmsnorm_silu_gate import (
    cake_rmsnorm_silu_gate,
    cake_rmsnorm_silu_gate_train_backward,
    cake_rmsnorm_silu_gate_train_backward_workspace_bytes,
    cake_rmsnorm_silu_gate_train_forward,
)
from .swiglu_weighted import (
    fused_swiglu_weighted,
    fused_swiglu_weighted_bwd,
    fused_swiglu_weighted_bwd_out,
    fused_swiglu_weighted_clamp_bwd,
)

__all__ = [
    "cake_rmsnorm_silu_gate",
    "cake_rmsnorm_silu_gate_train_backward",
    "cake_rmsnorm_silu_gate_train_backward_workspace_bytes",
    "cake_rmsnorm_silu_gate_train_forward",
    "fused_swiglu_weighted",
    "fused_swiglu_weighted_bwd",
    "fused_swiglu_weighted_bwd_out",
    "fused_swiglu_weighted_clamp_bwd",
]
