"""flash-linear-attention's rms_norm_gated: its Triton kernels, without autograd round them."""

import importlib
import os

import torch

PACKAGES = ("fla-core", "torch", "triton")


def _kernels():
    # What it chooses by timing is chosen anew by each process: another may have been disturbed.
    os.environ["FLA_CACHE_RESULTS"] = "0"
    from fla.modules import FusedRMSNormGated

    return importlib.import_module(FusedRMSNormGated.__module__)  # whose place moves between releases


def functions(device):
    if device != "gpu":
        raise ImportError("its kernels are for GPUs")
    kernels = _kernels()

    def backward(grad_out, x, z, weight, rstd):
        # Its kernels read dense rows; its public function copies others first, as here.
        z = z.contiguous()
        return kernels.layer_norm_gated_bwd(grad_out, x, z, weight, None, rstd=rstd, is_rms_norm=True)[:3]

    def forward(x, z, weight):
        return (kernels.layer_norm_gated_fwd(x, z.contiguous(), weight, None, eps=1e-6, is_rms_norm=True)[0],)

    return {"rmsnorm_silu_gate_bwd": backward, "rmsnorm_silu_gate": forward}


def prepare(op, inputs):
    """With rstd, which its forward leaves for its backward."""
    if op == "rmsnorm_silu_gate":
        return inputs
    return {**inputs, "rstd": torch.rsqrt(inputs["x"].float().square().mean(-1) + 1e-6)}


def forget():
    """Else the first of several sizes, of those up to 2048 rows say, would choose for all of them."""
    from triton.runtime import Autotuner

    for kernel in vars(_kernels()).values():
        while hasattr(kernel, "fn"):  # Triton's decorators, one in the other
            if isinstance(kernel, Autotuner):
                kernel.cache.clear()
            kernel = kernel.fn
