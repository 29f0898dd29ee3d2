"""Calls each function 100 000 times, every tenth time wrongly, and looks whether memory stays where it was.

    python tools/soak.py [--place gpu:0] [--calls 100000]

Some minutes on the CPU. Small calls, as what leaks does so by the call. Host memory is the process's resident set, device
memory what Paddle's tensors take and what the driver has given out. Exits with 1 where one of them has grown.
"""

import argparse
import gc
import sys

import numpy as np
import paddle

import paddle_gated_ops.incubate.nn.functional as F
from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn import RMSNormSiLUGate, WeightedSwiGLUExperts

# A call that kept one object of 32 bytes would take 3 MiB in 100 000; the heap's own swings are smaller.
ALLOWED_HOST_BYTES = 2 << 20
WARM_UP = 5000


def calls(place):
    """{name: a function of no arguments that makes one right call}, and the same of wrong calls."""
    swiglu, rmsnorm = testing.swiglu_weighted_inputs(3, 24), testing.rmsnorm_silu_gate_inputs(20)
    o1, do2_s, probs = (testing.tensor_of(array, place) for array in swiglu.values())
    grad_out, x, z, weight = (testing.bf16_tensor(array, place) for array in rmsnorm.values())
    do1, o2_s, out = (testing.bf16_tensor(array, place) for array in (swiglu["o1"], swiglu["do2_s"], rmsnorm["x"]))
    grad_weight = testing.float_tensor(np.zeros(128), place)
    leaf_o1, leaf_x = testing.bf16_tensor(swiglu["o1"], place, False), testing.bf16_tensor(rmsnorm["x"], place, False)
    norm = RMSNormSiLUGate()
    norm.weight.stop_gradient = True  # its cast to BF16 is a kernel of Paddle's

    def backward(output, grad, leaf):
        paddle.autograd.backward([output], [grad])
        leaf.clear_gradient(False)

    right = {
        "fused_swiglu_weighted": lambda: F.fused_swiglu_weighted(o1, probs),
        "fused_swiglu_weighted and its gradient": lambda: backward(F.fused_swiglu_weighted(leaf_o1, probs), do2_s, leaf_o1),
        "fused_swiglu_weighted_bwd": lambda: F.fused_swiglu_weighted_bwd(o1, do2_s, probs),
        "fused_swiglu_weighted_clamp_bwd": lambda: F.fused_swiglu_weighted_clamp_bwd(o1, do2_s, probs, 0.75),
        "fused_swiglu_weighted_bwd_out": lambda: F.fused_swiglu_weighted_bwd_out(o1, do2_s, probs, do1=do1, o2_s=o2_s),
        "cake_rmsnorm_silu_gate": lambda: F.cake_rmsnorm_silu_gate(x, z, weight),
        "cake_rmsnorm_silu_gate and its gradient": lambda: backward(
            F.cake_rmsnorm_silu_gate(leaf_x, z, weight), grad_out, leaf_x
        ),
        "cake_rmsnorm_silu_gate_train_forward": lambda: F.cake_rmsnorm_silu_gate_train_forward(x, z, weight, out=out),
        "cake_rmsnorm_silu_gate_train_backward": lambda: F.cake_rmsnorm_silu_gate_train_backward(
            grad_out, x, z, weight, grad_weight=grad_weight
        ),
        "cake_rmsnorm_silu_gate_train_backward_workspace_bytes": lambda: (
            F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(20, place)
        ),
    }
    wrong = {name: lambda: F.fused_swiglu_weighted_bwd(o1, o1, probs) for name in right}
    wrong["fused_swiglu_weighted_bwd_out"] = lambda: F.fused_swiglu_weighted_bwd_out(o1, do2_s, probs, do1=o1[:, ::-1])
    wrong["fused_swiglu_weighted_clamp_bwd"] = lambda: F.fused_swiglu_weighted_clamp_bwd(o1, do2_s, probs, -1.0)
    wrong["fused_swiglu_weighted"] = lambda: F.fused_swiglu_weighted(o1, None)
    wrong["fused_swiglu_weighted and its gradient"] = lambda: F.fused_swiglu_weighted(leaf_o1, o1)
    wrong["cake_rmsnorm_silu_gate"] = lambda: F.cake_rmsnorm_silu_gate(x, z, weight, "1e-6")
    wrong["cake_rmsnorm_silu_gate and its gradient"] = lambda: F.cake_rmsnorm_silu_gate(leaf_x, z, x)
    wrong["cake_rmsnorm_silu_gate_train_forward"] = lambda: F.cake_rmsnorm_silu_gate_train_forward(x, z, weight, out=o1)
    wrong["cake_rmsnorm_silu_gate_train_backward"] = lambda: F.cake_rmsnorm_silu_gate_train_backward(
        grad_out, x, z, weight, grad_x=x[:, ::-1]
    )
    wrong["cake_rmsnorm_silu_gate_train_backward_workspace_bytes"] = lambda: (
        F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(-1)
    )
    if place == "cpu":  # layers need products and casts of Paddle's
        experts, tokens = WeightedSwiGLUExperts(2, 8, 6), paddle.ones([3, 8])
        right["RMSNormSiLUGate"], wrong["RMSNormSiLUGate"] = lambda: norm(x, z), lambda: norm(x, weight)

        def train_experts():
            experts(tokens, probs, [1, 2]).sum().backward()
            experts.clear_gradients()

        right["WeightedSwiGLUExperts and its gradient"] = train_experts
        wrong["WeightedSwiGLUExperts and its gradient"] = lambda: experts(tokens, probs, [1, 1])
    return right, wrong


def memory(place):
    """Bytes: the process's resident set; on a GPU also what Paddle's tensors take, and what is taken of the whole device."""
    gc.collect()
    with open("/proc/self/statm") as file:
        found = {"host": int(file.read().split()[1]) * 4096}
    if place != "cpu":
        paddle.device.cuda.synchronize()
        found["device"] = paddle.device.cuda.memory_allocated(0)
        found["reserved"] = paddle.device.cuda.memory_reserved(0)
    return found


def refused(call):
    try:
        call()
    except (TypeError, ValueError):
        return True
    return False


def grown(place, right, wrong, count):
    """By how many bytes each kind of memory has grown over the calls, what the first ones load aside."""

    def run(number):
        for i in range(number):
            if i % 10:
                right()
            else:
                assert refused(wrong), "the wrong call went through"

    run(min(WARM_UP, count))
    before = memory(place)
    run(count)
    after = memory(place)
    return {kind: after[kind] - before[kind] for kind in before}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", default="cpu")
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--only", default="", help="part of a function's name")
    options = parser.parse_args()
    paddle.set_device(options.place)
    right, wrong = calls(options.place)
    leaking = []
    for name in right:
        if options.only not in name:
            continue
        found = grown(options.place, right[name], wrong[name], options.calls)
        bad = any(size > (ALLOWED_HOST_BYTES if kind == "host" else 0) for kind, size in found.items())
        leaking += [name] * bad
        growth = ", ".join(f"{kind} {size:+d}" for kind, size in found.items())
        print(f"{'LEAKS ' if bad else ''}{name}: {options.calls} calls, bytes: {growth}", flush=True)
    sys.exit(f"memory grew in {', '.join(leaking)}" if leaking else 0)


if __name__ == "__main__":
    main()
