#!/usr/bin/env bash
# A short run of all functions through Paddle under each of compute-sanitizer's tools, which look at this library's kernels
# alone. tools/check_kernels.sh is the long one, without Paddle. PYTHON is an interpreter that imports a GPU build of Paddle
# and paddle_gated_ops; default python3.
set -euo pipefail
cd "$(dirname "$0")/.."
script=$(mktemp --suffix=.py)
trap 'rm -f "$script"' EXIT
cat >"$script" <<'PY'
import paddle

import paddle_gated_ops.incubate.nn.functional as F
from paddle_gated_ops import testing

paddle.set_device("gpu:0")
calls = 0


def tensors(inputs, kind):
    return [testing.strided_view(array, kind if name != "weight" else "contiguous", "gpu:0")[0] for name, array in inputs.items()]


for kind in ("contiguous", "offset", "step2", "transposed"):
    for rows, width in ((3, 8), (5, 101), (2, 1408)):
        inputs = testing.swiglu_weighted_inputs(rows, width)
        o1, do2_s, probs = tensors(inputs, kind)
        do1, probs_grad, o2_s = F.fused_swiglu_weighted_bwd(o1, do2_s, probs)
        F.fused_swiglu_weighted_clamp_bwd(o1, do2_s, probs, 0.75)
        F.fused_swiglu_weighted(o1, probs)
        outputs = {"do1": testing.bits_of(do1), "probs_grad": testing.floats_of(probs_grad), "o2_s": testing.bits_of(o2_s)}
        testing.assert_swiglu_weighted_bwd(inputs, outputs)
        F.fused_swiglu_weighted_bwd_out(o1, do2_s, probs, do1=o1, o2_s=do2_s)
        calls += 4
    for rows in (1, 17, 300):
        inputs = testing.rmsnorm_silu_gate_inputs(rows)
        grad_out, x, z, weight = tensors(inputs, kind)
        F.cake_rmsnorm_silu_gate(x, z, weight)
        outputs = F.cake_rmsnorm_silu_gate_train_backward(grad_out, x, z, weight)
        names = ("grad_x", "grad_z", "grad_weight")
        outputs = {name: testing.bits_of(tensor) for name, tensor in zip(names, outputs)}
        testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs)
        F.cake_rmsnorm_silu_gate_train_backward(grad_out, x, z, weight, grad_x=x, grad_z=z, compute_grad_weight=False)
        calls += 3
paddle.device.cuda.synchronize()
print(calls, "calls through Paddle, the backwards compared with float64")
PY
for tool in memcheck racecheck initcheck synccheck; do
    echo "-- compute-sanitizer $tool"
    # Without the errors of calls, as a Paddle without machine code for the GPU makes its own, and without a look at copies to
    # the host, as what other kernels have written is not followed.
    compute-sanitizer --tool "$tool" --kernel-name kns=paddle_gated_ops --report-api-errors no \
        --check-api-memory-access no --error-exitcode 1 \
        "${PYTHON:-python3}" "$script"
done
