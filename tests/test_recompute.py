"""Under recompute, in both of its modes, gradients have the bits that they have without."""

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import EVERY_SUBSET, FORWARDS, array_of, assert_gradients, backward_into, tensor_of
from paddle_gated_ops import testing
from paddle_gated_ops._library import C


def recompute(function, *arguments, use_reentrant):
    from paddle.distributed.fleet.utils import recompute

    # No random numbers are drawn, and their state is what Paddle can't keep on every device.
    return recompute(function, *arguments, use_reentrant=use_reentrant, preserve_rng_state=False)


@pytest.fixture(params=[True, False], ids=["reentrant", "not reentrant"])
def use_reentrant(request):
    return request.param


@pytest.mark.parametrize("name, wanted", EVERY_SUBSET)
def test_gradients(place, name, wanted, use_reentrant):
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays(37)
    leaves = forward.leaves(arrays, place, wanted)
    output = recompute(forward.function, *leaves.values(), use_reentrant=use_reentrant)
    np.testing.assert_array_equal(array_of(output.detach()), forward.output(arrays, place))
    backward_into(output, tensor_of(arrays[forward.output_grad], place))
    assert_gradients(leaves, forward.gradients(arrays, place), wanted)


@pytest.mark.parametrize("name", FORWARDS)
def test_the_forward_runs_again(monkeypatch, name, use_reentrant):
    calls, entry = [], getattr(C, FORWARDS[name].entry)
    monkeypatch.setattr(C, FORWARDS[name].entry, lambda *arguments: (calls.append(1), entry(*arguments))[1])
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays(5)
    output = recompute(forward.function, *forward.leaves(arrays, "cpu").values(), use_reentrant=use_reentrant)
    assert len(calls) == 1
    backward_into(output, tensor_of(arrays[forward.output_grad], "cpu"))
    assert len(calls) == 2


def block(o1, probs, z, weight):
    return F.cake_rmsnorm_silu_gate(F.fused_swiglu_weighted(o1, probs), z, weight)


def test_both_functions_in_a_block(place, use_reentrant):
    swiglu, norm = testing.swiglu_weighted_inputs(30, 128), testing.rmsnorm_silu_gate_inputs(30)
    arrays = {name: {**swiglu, **norm}[name] for name in ("o1", "unzipped_probs", "z", "weight")}

    def run(how):
        leaves = [tensor_of(array, place) for array in arrays.values()]
        for leaf in leaves:
            leaf.stop_gradient = False
        backward_into(how(*leaves), tensor_of(norm["grad_out"], place))
        return [array_of(leaf.grad) for leaf in leaves]

    for found, expected in zip(run(lambda *leaves: recompute(block, *leaves, use_reentrant=use_reentrant)), run(block)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("as_argument", [False, True])
def test_main_grad(use_reentrant, as_argument):
    if use_reentrant and as_argument:
        pytest.skip("this mode of recompute hands a detached copy to the function, as it does for each argument")
    inputs = testing.rmsnorm_silu_gate_inputs(50)
    values = testing.from_bf16_bits(inputs["weight"]).astype("float32")

    def run(recomputed):
        paddle.set_device("cpu")
        initializer = paddle.nn.initializer.Assign(values)
        weight, hooks = paddle.create_parameter([128], "bfloat16", default_initializer=initializer), []
        weight.main_grad = tensor_of(np.zeros(128, np.float32), "cpu")
        weight._register_backward_hook(lambda *_: hooks.append(1))
        x, z = tensor_of(inputs["x"], "cpu"), tensor_of(inputs["z"], "cpu")
        x.stop_gradient = z.stop_gradient = False

        def of_parameter(x, z):
            return F.cake_rmsnorm_silu_gate(x, z, weight)

        function, arguments = (F.cake_rmsnorm_silu_gate, (x, z, weight)) if as_argument else (of_parameter, (x, z))
        for _ in range(2):
            output = recompute(function, *arguments, use_reentrant=use_reentrant) if recomputed else function(*arguments)
            backward_into(output, tensor_of(inputs["grad_out"], "cpu"))
        assert weight.grad is None and len(hooks) == 2
        return array_of(weight.main_grad)

    np.testing.assert_array_equal(run(True), run(False))
