"""Both ops as the backward of a PyLayer: right gradients, each in its slot, None where none is due."""

import itertools

import numpy as np
import paddle
import pytest
from paddle.autograd import PyLayer

from calls import RMSNORM_INPUTS, SWIGLU_INPUTS, array_of, raw, tensor_of, tensors_of
from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn import functional as F
from paddle_gated_ops.testing import reference, to_bf16_bits


class WeightedSwiglu(PyLayer):
    """o2_s = SiLU(gate) * up * p. The forward is the float64 reference, rounded: it runs on any place."""

    @staticmethod
    def forward(ctx, o1, probs):
        ctx.save_for_backward(o1, probs)
        ctx.wanted = [not o1.stop_gradient, not probs.stop_gradient]
        output = reference.swiglu_weighted(array_of(o1), array_of(probs))
        return tensor_of(to_bf16_bits(output), o1.place)

    @staticmethod
    def backward(ctx, do2_s):
        o1, probs = ctx.saved_tensor()
        do1, probs_grad, _ = F.fused_swiglu_weighted_bwd(o1, do2_s, probs)
        return tuple(g if wanted else None for g, wanted in zip((do1, probs_grad), ctx.wanted))


class RmsNormSiluGate(PyLayer):
    """y = RMSNorm(x) * weight * SiLU(z), likewise."""

    @staticmethod
    def forward(ctx, x, z, weight):
        ctx.save_for_backward(x, z, weight)
        ctx.wanted = [not tensor.stop_gradient for tensor in (x, z, weight)]
        output = reference.rmsnorm_silu_gate(array_of(x), array_of(z), array_of(weight))
        return tensor_of(to_bf16_bits(output), x.place)

    @staticmethod
    def backward(ctx, grad_out):
        x, z, weight = ctx.saved_tensor()
        grads = F.cake_rmsnorm_silu_gate_train_backward(grad_out, x, z, weight, compute_grad_weight=ctx.wanted[2])
        return tuple(grad if wanted else None for grad, wanted in zip(grads, ctx.wanted))


def leaves(inputs, names, wanted, place):
    tensors = tensors_of({name: inputs[name] for name in names}, place)
    for name, want in zip(names, wanted):
        tensors[name].stop_gradient = not want
    return tensors


SOME = [combination for combination in itertools.product([True, False], repeat=3) if any(combination)]


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_swiglu(place, wanted):
    inputs = testing.swiglu_weighted_inputs((3, 5), 24, seed=1)
    tensors = leaves(inputs, ("o1", "unzipped_probs"), wanted, place)
    output = WeightedSwiglu.apply(*tensors.values())
    assert not output.stop_gradient
    paddle.autograd.backward([output], [tensor_of(inputs["do2_s"], place)])
    outputs = F.fused_swiglu_weighted_bwd(**tensors_of(inputs, place))
    expected = dict(zip(("o1", "unzipped_probs"), map(array_of, outputs)))
    for (name, tensor), want in zip(tensors.items(), wanted):
        assert (tensor.grad is not None) == want, name
        if want:
            np.testing.assert_array_equal(raw(array_of(tensor.grad)), raw(expected[name]), err_msg=name)
        np.testing.assert_array_equal(raw(array_of(tensor)), raw(inputs[name]))
    outputs = dict(zip(("do1", "probs_grad", "o2_s"), map(array_of, outputs)))
    testing.assert_swiglu_weighted_bwd(inputs, outputs)


@pytest.mark.parametrize("wanted", SOME)
def test_rmsnorm(place, wanted):
    inputs = testing.rmsnorm_silu_gate_inputs((4, 7), seed=2)
    names = RMSNORM_INPUTS[1:]
    tensors = leaves(inputs, names, wanted, place)
    output = RmsNormSiluGate.apply(*tensors.values())
    paddle.autograd.backward([output], [tensor_of(inputs["grad_out"], place)])
    expected = dict(zip(names, F.cake_rmsnorm_silu_gate_train_backward(**tensors_of(inputs, place))))
    for (name, tensor), want in zip(tensors.items(), wanted):
        assert (tensor.grad is not None) == want, name
        if want:
            np.testing.assert_array_equal(array_of(tensor.grad), array_of(expected[name]), err_msg=name)


def test_gradient_of_a_loss(place):
    # One layer's output into the other: the gradients of sum(c * y) against float64 all the way.
    rows, width = 6, 128
    swiglu = testing.swiglu_weighted_inputs(rows, width, seed=3)
    norm = testing.rmsnorm_silu_gate_inputs(rows, seed=4)
    o1, probs, c = swiglu["o1"], swiglu["unzipped_probs"], norm["grad_out"]
    # Not the probabilities': a norm does not see the scale of its input, so that their gradients are all but 0.
    tensors = leaves({**swiglu, **norm}, ("o1", "z", "weight"), [True] * 3, place)
    hidden = WeightedSwiglu.apply(tensors["o1"], tensor_of(probs, place))
    output = RmsNormSiluGate.apply(hidden, tensors["z"], tensors["weight"])
    paddle.autograd.backward([output], [tensor_of(c, place)])

    x = reference.swiglu_weighted(o1, probs)
    upper = reference.cake_rmsnorm_silu_gate_train_backward(c, x, norm["z"], norm["weight"])
    lower = reference.fused_swiglu_weighted_bwd(o1, upper.grad_x, probs)
    # BF16 rounds on the way, with errors in proportion to the terms of each sum, not to what is left of them.
    scale = dict(upper.magnitudes)
    scale.update(reference.fused_swiglu_weighted_bwd(o1, scale["grad_x"].terms, probs).magnitudes)
    true = {"o1": lower.do1, "z": upper.grad_z, "weight": upper.grad_weight}
    outputs = {"o1": "do1", "z": "grad_z", "weight": "grad_weight"}
    for name, tensor in tensors.items():
        error = np.abs(reference.to_float64(array_of(tensor.grad)) - true[name])
        bound = 3 * 2.0**-8 * scale[outputs[name]].terms
        assert (error <= bound).all(), f"{name}: {(error / bound).max()} times the bound"
        assert np.mean(np.abs(true[name]) > 4 * bound) > 0.5, name  # another gradient would show


def test_no_graph_is_recorded(place):
    inputs = testing.swiglu_weighted_inputs(4, 8)
    tensors = leaves(inputs, SWIGLU_INPUTS, [True] * 3, place)
    for tensor in F.fused_swiglu_weighted_bwd(**tensors):
        assert tensor.stop_gradient and tensor.grad_fn is None
