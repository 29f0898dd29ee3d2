"""torch.compile of the formulas: FP32 inside, BF16 at the borders."""

import torch
import torch._inductor.config
import torch.nn.functional as F

from ..cases import CLAMP_VALUE

PACKAGES = ("torch",)


def _halves(o1, clamp):
    gate, up = o1.float().chunk(2, -1)
    if not clamp:
        return gate, up, None, None
    inside = (gate <= CLAMP_VALUE).float(), (up.abs() <= CLAMP_VALUE).float()
    return (gate.clamp(max=CLAMP_VALUE), up.clamp(-CLAMP_VALUE, CLAMP_VALUE), *inside)


def _swiglu_weighted_bwd(o1, do2_s, unzipped_probs, clamp=False):
    gate, up, gate_inside, up_inside = _halves(o1, clamp)
    d, p = do2_s.float(), unzipped_probs.unsqueeze(-1)
    s = torch.sigmoid(gate)
    silu = s * gate
    gate_grad, up_grad = s * (1 + gate * (1 - s)) * p * d * up, silu * p * d
    if clamp:
        gate_grad, up_grad = gate_grad * gate_inside, up_grad * up_inside
    do1 = torch.cat([gate_grad, up_grad], -1).bfloat16()
    return do1, (silu * d * up).sum(-1), (silu * p * up).bfloat16()


def _swiglu_weighted_clamp_bwd(**inputs):
    return _swiglu_weighted_bwd(**inputs, clamp=True)


def _swiglu_weighted(o1, unzipped_probs):
    gate, up = o1.float().chunk(2, -1)
    return ((F.silu(gate) * unzipped_probs.unsqueeze(-1) * up).bfloat16(),)


def _rmsnorm_silu_gate_bwd(grad_out, x, z, weight, eps=1e-6):
    d, x, z, weight = (tensor.float() for tensor in (grad_out, x, z, weight))
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    n, s = x * rstd, torch.sigmoid(z)
    a = s * z * d
    c = a * weight
    grad_x = rstd * (c - n * (c * n).mean(-1, keepdim=True))
    grad_z = s * (1 + z * (1 - s)) * d * n * weight
    return grad_x.bfloat16(), grad_z.bfloat16(), (a * n).sum(0).bfloat16()


def _rmsnorm_silu_gate(x, z, weight, eps=1e-6):
    x, z, weight = (tensor.float() for tensor in (x, z, weight))
    return ((F.silu(z) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).bfloat16(),)


def functions(device):
    # What it chooses by timing is chosen anew by each process: another may have been disturbed.
    torch._inductor.config.autotune_local_cache = False
    # Code for the very sizes, as for the other peers' constants.
    return {
        "swiglu_weighted_bwd": torch.compile(_swiglu_weighted_bwd, dynamic=False),
        "swiglu_weighted_clamp_bwd": torch.compile(_swiglu_weighted_clamp_bwd, dynamic=False),
        "swiglu_weighted": torch.compile(_swiglu_weighted, dynamic=False),
        "rmsnorm_silu_gate_bwd": torch.compile(_rmsnorm_silu_gate_bwd, dynamic=False),
        "rmsnorm_silu_gate": torch.compile(_rmsnorm_silu_gate, dynamic=False),
    }


def forget():
    torch._dynamo.reset()
