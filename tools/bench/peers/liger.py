"""Liger's SwiGLU backward, which does less: no probabilities, hence no probs_grad, and o2_s is not recomputed."""

PACKAGES = ("liger-kernel", "torch", "triton")
OUTPUTS = ("do1",)
PROBS = 1.0
BYTES = 10


def functions(device):
    if device != "gpu":
        raise ImportError("its kernels are for GPUs")
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward

    return {"swiglu_weighted_bwd": lambda o1, do2_s, unzipped_probs: (swiglu_fused_gate_up_backward(o1, do2_s),)}
