"""Fused backward ops of gated activations for Paddle, on CPU and GPU.

    import paddle_gated_ops.incubate.nn.functional as F
    do1, probs_grad, o2_s = F.fused_swiglu_weighted_bwd(o1, do2_s, unzipped_probs)
    grad_x, grad_z, grad_weight = F.cake_rmsnorm_silu_gate_train_backward(grad_out, x, z, weight)

``run_check()`` tells whether both are right on the machine at hand, ``show_config()`` what a bug report needs.
"""

from . import incubate, testing
from ._patch import patch_paddle
from ._run_check import run_check
from ._show_config import show_config
from ._threads import get_num_threads, set_num_threads
from ._version import __version__

__all__ = [
    "__version__",
    "get_num_threads",
    "incubate",
    "patch_paddle",
    "run_check",
    "set_num_threads",
    "show_config",
    "testing",
]
