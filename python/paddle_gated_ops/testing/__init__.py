"""Float64 references, error bounds and test inputs for both ops.

Importing this package needs NumPy alone; the functions that make or read tensors import Paddle
when they are called.

    inputs = testing.swiglu_weighted_inputs(rows=5, intermediate_size=12)
    do1, probs_grad, o2_s = fused_swiglu_weighted_bwd(
        testing.bf16_tensor(inputs["o1"]),
        testing.bf16_tensor(inputs["do2_s"]),
        testing.float_tensor(inputs["unzipped_probs"]),
    )
    testing.assert_swiglu_weighted_bwd(inputs, {
        "do1": testing.bits_of(do1),
        "probs_grad": testing.floats_of(probs_grad),
        "o2_s": testing.bits_of(o2_s),
    })
"""

from . import inputs, reference, tolerance
from .bf16 import bf16_ulp, from_bf16_bits, to_bf16_bits
from .inputs import (
    VIEW_KINDS,
    array_of,
    bf16_tensor,
    bits_of,
    damaged_canaries,
    float_tensor,
    floats_of,
    read_view,
    rmsnorm_silu_gate_inputs,
    strided_view,
    swiglu_weighted_inputs,
    tensor_of,
)
from .tolerance import (
    assert_rmsnorm_silu_gate,
    assert_rmsnorm_silu_gate_bwd,
    assert_swiglu_weighted,
    assert_swiglu_weighted_bwd,
    check_rmsnorm_silu_gate,
    check_rmsnorm_silu_gate_bwd,
    check_swiglu_weighted,
    check_swiglu_weighted_bwd,
    error_in_bounds,
    error_in_ulps,
    promise1_bound,
    promise3_bound,
)

__all__ = [
    "VIEW_KINDS",
    "array_of",
    "assert_rmsnorm_silu_gate",
    "assert_rmsnorm_silu_gate_bwd",
    "assert_swiglu_weighted",
    "assert_swiglu_weighted_bwd",
    "bf16_tensor",
    "bf16_ulp",
    "bits_of",
    "check_rmsnorm_silu_gate",
    "check_rmsnorm_silu_gate_bwd",
    "check_swiglu_weighted",
    "check_swiglu_weighted_bwd",
    "damaged_canaries",
    "error_in_bounds",
    "error_in_ulps",
    "float_tensor",
    "floats_of",
    "from_bf16_bits",
    "inputs",
    "promise1_bound",
    "promise3_bound",
    "read_view",
    "reference",
    "rmsnorm_silu_gate_inputs",
    "strided_view",
    "swiglu_weighted_inputs",
    "tensor_of",
    "to_bf16_bits",
    "tolerance",
]
