"""The worst errors of ten million random elements of each result, in units of the promised bound: 1 or less is right.

    python tools/worst_errors.py [--place gpu:0] [--elements 10000000]

Inputs of magnitude 1, of gates from -100 to 100 with the rest of magnitude 1, and of any bits: all finite BF16 numbers for
the first op; from 2^-30 to 2^30 for the second, whose every row would leave FP32's range with more.
"""

import argparse
import sys

import numpy as np
import paddle

import paddle_gated_ops.incubate.nn.functional as F
from paddle_gated_ops import testing

BLOCK = 1 << 20  # elements of a call


def gates_of_any_size(generator, bits):
    return testing.to_bf16_bits(generator.uniform(-100, 100, bits.shape))


def any_bits(generator, shape, least=0, most=254):
    """BF16 numbers of any sign and fraction, their exponents' bits from least to most."""
    sign, fraction = generator.integers(0, 2, shape) << 15, generator.integers(0, 128, shape)
    return (sign | generator.integers(least, most + 1, shape) << 7 | fraction).astype(np.uint16)


def swiglu_inputs(kind, generator, seed):
    width = 1024
    inputs = testing.swiglu_weighted_inputs(BLOCK // width, width, seed)
    if kind == "gates":
        inputs["o1"][:, :width] = gates_of_any_size(generator, inputs["o1"][:, :width])
    elif kind == "bits":
        inputs = {name: any_bits(generator, array.shape) for name, array in inputs.items()}
        inputs["unzipped_probs"] = testing.from_bf16_bits(inputs["unzipped_probs"]).astype(np.float32)
    return inputs


def rmsnorm_inputs(kind, generator, seed):
    inputs = testing.rmsnorm_silu_gate_inputs(BLOCK // 128, seed)
    if kind == "gates":
        inputs["z"] = gates_of_any_size(generator, inputs["z"])
    elif kind == "bits":
        inputs = {name: any_bits(generator, array.shape, 97, 157) for name, array in inputs.items()}
    return inputs


def tensors(inputs, place):
    return {name: testing.tensor_of(array, place) for name, array in inputs.items()}


def swiglu_errors(inputs, place):
    given = tensors(inputs, place)
    do1, probs_grad, o2_s = F.fused_swiglu_weighted_bwd(**given)
    arrays = {"do1": testing.bits_of(do1), "probs_grad": testing.floats_of(probs_grad), "o2_s": testing.bits_of(o2_s)}
    errors = testing.check_swiglu_weighted_bwd(inputs, arrays)
    found = {f"fused_swiglu_weighted_bwd: {name}": error for name, error in errors.items()}
    given.pop("do2_s")
    output = testing.bits_of(F.fused_swiglu_weighted(**given))
    found["fused_swiglu_weighted: o2_s"] = testing.check_swiglu_weighted(inputs, output)["o2_s"]
    return found


def rmsnorm_errors(inputs, place):
    given = tensors(inputs, place)
    grad_weight = testing.float_tensor(np.zeros(128), place)
    grad_x, grad_z, _ = F.cake_rmsnorm_silu_gate_train_backward(**given, grad_weight=grad_weight)
    arrays = {"grad_x": testing.bits_of(grad_x), "grad_z": testing.bits_of(grad_z)}
    arrays["grad_weight"] = testing.floats_of(grad_weight)
    errors = testing.check_rmsnorm_silu_gate_bwd(inputs, arrays)
    found = {f"cake_rmsnorm_silu_gate_train_backward: {name}": error for name, error in errors.items()}
    given.pop("grad_out")
    output = testing.bits_of(F.cake_rmsnorm_silu_gate(**given))
    found["cake_rmsnorm_silu_gate: y"] = testing.check_rmsnorm_silu_gate(inputs, output)["y"]
    return found


def worst(make, errors, kind, place, elements):
    found = {}
    for seed in range(-(-elements // BLOCK)):
        for name, error in errors(make(kind, np.random.default_rng(seed), seed), place).items():
            found[name] = max(error, found.get(name, 0.0))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", default="cpu")
    parser.add_argument("--elements", type=int, default=10_000_000)
    options = parser.parse_args()
    paddle.set_device(options.place)
    largest = 0.0
    for kind in ("normal", "gates", "bits"):
        for make, errors in ((swiglu_inputs, swiglu_errors), (rmsnorm_inputs, rmsnorm_errors)):
            for name, error in worst(make, errors, kind, options.place, options.elements).items():
                print(f"{kind}, {options.elements} elements, {name}: {error:.4f}", flush=True)
                largest = max(largest, error)
    sys.exit(0 if largest <= 1 else f"an error is {largest} times its bound")


if __name__ == "__main__":
    main()
