"""The forwards under autograd in eager mode: whose gradients are computed, what is saved, and what is refused."""

import gc
import weakref

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import (
    EVERY_SUBSET,
    FORWARDS,
    allocated,
    array_of,
    assert_gradients,
    assert_same_bits,
    backward_into,
    peak_of,
    tensor_of,
    tensors_of,
)
from paddle_gated_ops import testing
from paddle_gated_ops._library import C

ROWS = 37


@pytest.mark.parametrize("name, wanted", EVERY_SUBSET)
def test_gradients_are_the_backwards(place, name, wanted):
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays(ROWS, seed=1)
    leaves = forward.leaves(arrays, place, wanted)
    output = forward.function(**leaves)
    assert not output.stop_gradient and not output.is_leaf
    backward_into(output, tensor_of(arrays[forward.output_grad], place))
    assert_gradients(leaves, forward.gradients(arrays, place), wanted)
    np.testing.assert_array_equal(array_of(output.detach()), forward.output(arrays, place))


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("rows", [(), (0,), (2, 3)])
def test_any_leading_shape(place, name, rows):
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays(rows)
    leaves = forward.leaves(arrays, place)
    backward_into(forward.function(**leaves), tensor_of(arrays[forward.output_grad], place))
    assert_gradients(leaves, forward.gradients(arrays, place), forward.inputs)


def test_probabilities_as_a_column(place):
    forward, arrays = FORWARDS["swiglu"], FORWARDS["swiglu"].arrays(ROWS)
    arrays["unzipped_probs"] = arrays["unzipped_probs"].reshape(ROWS, 1)
    leaves = forward.leaves(arrays, place)
    backward_into(forward.function(**leaves), tensor_of(arrays["do2_s"], place))
    assert_gradients(leaves, forward.gradients(arrays, place), forward.inputs)


@pytest.mark.parametrize("kind", ["offset", "column_slice", "packed", "step2", "transposed", "reversed", "row_slice"])
@pytest.mark.parametrize("name", FORWARDS)
def test_views_and_a_strided_gradient(place, name, kind):
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays((3, 5))
    leaves = forward.leaves(arrays, place)
    for leaf in forward.inputs[:2]:
        leaves[leaf], _ = testing.strided_view(arrays[leaf], kind, place)
        leaves[leaf].stop_gradient = False
    grad = tensor_of(arrays[forward.output_grad], place)
    if place == "cpu":  # Paddle copies the gradient that it is given: a strided one with a kernel of its own
        grad, _ = testing.strided_view(arrays[forward.output_grad], kind, place)
    backward_into(forward.function(**leaves), grad)
    assert_gradients(leaves, forward.gradients(arrays, place), forward.inputs)


class Spy:
    """Stands in for a C++ function and keeps the arguments of its calls."""

    def __init__(self, monkeypatch, name):
        self.calls, self.function = [], getattr(C, name)
        monkeypatch.setattr(C, name, self)

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.function(*arguments)


@pytest.mark.parametrize("name, wanted", EVERY_SUBSET)
def test_what_nobody_wants_is_not_computed(monkeypatch, place, name, wanted):
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays(4)
    leaves, grad = forward.leaves(arrays, place, wanted), tensor_of(arrays[forward.output_grad], place)
    if name == "rmsnorm":
        spy = Spy(monkeypatch, "cake_rmsnorm_silu_gate_train_backward")
        backward_into(forward.function(**leaves), grad)
        (call,) = spy.calls
        compute_grad_weight, want_grad_x, want_grad_z = call[9], call[11], call[12]
        assert (want_grad_x, want_grad_z, compute_grad_weight) == tuple(n in wanted for n in forward.inputs)
    else:
        spy = Spy(monkeypatch, "fused_swiglu_weighted_bwd_out")
        backward_into(forward.function(**leaves), grad)
        (call,) = spy.calls
        *given, want_do1, want_probs_grad, want_o2_s = call[5:]
        assert (want_do1, want_probs_grad) == tuple(n in wanted for n in forward.inputs)
        assert want_o2_s is False  # autograd never writes o2_s
        assert given == [None, None, None]


@pytest.mark.parametrize("name, wanted", EVERY_SUBSET)
def test_unwanted_gradients_take_no_memory(name, wanted):
    rows = 2000
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays(rows)
    leaves, grad = forward.leaves(arrays, "cpu", wanted), tensor_of(arrays[forward.output_grad], "cpu")
    output = forward.function(**leaves)
    peak = peak_of(lambda: backward_into(output, grad))
    expected = sum(arrays[n].nbytes for n in wanted)
    expected += arrays[forward.output_grad].nbytes  # Paddle copies the gradient that it is given
    workspace = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows) if "weight" in wanted else 0
    assert expected <= peak <= expected + workspace + 4096


@pytest.mark.parametrize("name", FORWARDS)
def test_the_inputs_alone_are_saved(name):
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays(2000)
    gc.collect()
    before = allocated()
    leaves = forward.leaves(arrays, "cpu")
    inputs = allocated() - before
    output = forward.function(**leaves)
    assert allocated() - before <= inputs + arrays[forward.output_grad].nbytes + 1024  # the output, and nothing else
    first = weakref.ref(leaves[forward.inputs[0]])
    del leaves
    gc.collect()
    assert first() is not None  # the node holds it
    grad = tensor_of(arrays[forward.output_grad], "cpu")
    backward_into(output, grad)
    del output, grad
    gc.collect()
    assert first() is None
    assert allocated() <= before + 1024


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("how", ["no_grad", "stop_gradient", "set_grad_enabled"])
def test_no_node_and_no_saved_tensor(name, how):
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays(2000)
    gc.collect()
    before = allocated()
    leaves = forward.leaves(arrays, "cpu", () if how == "stop_gradient" else None)
    if how == "no_grad":
        with paddle.no_grad():
            output = forward.function(**leaves)
    elif how == "set_grad_enabled":
        with paddle.set_grad_enabled(False):
            output = forward.function(**leaves)
    else:
        output = forward.function(**leaves)
    assert output.stop_gradient and output.grad_fn is None and output.is_leaf
    references = [weakref.ref(tensor) for tensor in leaves.values()]
    del leaves
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert allocated() - before <= arrays[forward.output_grad].nbytes + 1024


@pytest.mark.parametrize("name, wanted", EVERY_SUBSET)
def test_no_second_gradient(place, name, wanted):
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays(4)
    leaves, grad = forward.leaves(arrays, place, wanted), tensor_of(arrays[forward.output_grad], place)
    output = forward.function(**leaves)
    asked = [leaves[name] for name in wanted]
    for targets in (asked, asked[:1]):
        with pytest.raises(NotImplementedError, match=rf"{forward.entry}: .*create_graph=False"):
            paddle.grad([output], targets, [grad], create_graph=True)
    # Nothing has happened to the graph.
    expected = forward.gradients(arrays, place)
    found = paddle.grad([output], asked, [grad], retain_graph=True)
    assert_same_bits(dict(zip(wanted, map(array_of, found))), {n: expected[n] for n in wanted})
    backward_into(output, grad)
    assert_gradients(leaves, expected, wanted)


def test_no_second_gradient_in_a_model():
    forward, arrays = FORWARDS["rmsnorm"], FORWARDS["rmsnorm"].arrays(4)
    leaves = forward.leaves(arrays, "cpu")
    source = testing.float_tensor(testing.from_bf16_bits(arrays["x"]), "cpu", stop_gradient=False)
    output = forward.function(source.astype("bfloat16"), leaves["z"], leaves["weight"]).astype("float32").sum()
    with pytest.raises(NotImplementedError, match="cake_rmsnorm_silu_gate: .*create_graph=False"):
        paddle.grad([output], [source], create_graph=True)


@pytest.mark.parametrize("name", FORWARDS)
def test_a_graph_that_is_retained(place, name):
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays(4)
    leaves, grad = forward.leaves(arrays, place), tensor_of(arrays[forward.output_grad], place)
    output = forward.function(**leaves)
    expected = forward.gradients(arrays, place)
    for retain in (True, True, False):
        grads = paddle.grad([output], list(leaves.values()), [grad], retain_graph=retain)
        assert_same_bits(dict(zip(leaves, map(array_of, grads))), expected)
    assert all(leaf.grad is None for leaf in leaves.values())


@pytest.mark.parametrize("name", FORWARDS)
def test_inputs_and_gradient_are_unchanged(place, name):
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays(ROWS)
    leaves, grad = forward.leaves(arrays, place), tensor_of(arrays[forward.output_grad], place)
    backward_into(forward.function(**leaves), grad)
    found = {**{leaf: array_of(tensor.detach()) for leaf, tensor in leaves.items()}, forward.output_grad: array_of(grad)}
    assert_same_bits(found, {leaf: arrays[leaf] for leaf in found})


def test_one_function_into_the_other():
    # Leaves in FP32, casts between, as in a model on the CPU; against the backward ops one after the other.
    swiglu, norm = testing.swiglu_weighted_inputs(8, 128, seed=3), testing.rmsnorm_silu_gate_inputs(8, seed=4)
    o1 = paddle.to_tensor(testing.from_bf16_bits(swiglu["o1"]).astype("float32"), stop_gradient=False)
    z, weight = tensor_of(norm["z"], "cpu"), tensor_of(norm["weight"], "cpu")
    probs = tensor_of(swiglu["unzipped_probs"], "cpu")
    for tensor in (z, weight, probs):
        tensor.stop_gradient = False
    x = F.fused_swiglu_weighted(o1.astype("bfloat16"), probs)
    y = F.cake_rmsnorm_silu_gate(x, z, weight)
    backward_into(y, tensor_of(norm["grad_out"], "cpu"))
    with paddle.no_grad():
        grad_x, grad_z, grad_weight = F.cake_rmsnorm_silu_gate_train_backward(
            tensor_of(norm["grad_out"], "cpu"), x.detach(), z.detach(), weight.detach()
        )
        do1, probs_grad, _ = F.fused_swiglu_weighted_bwd(tensor_of(swiglu["o1"], "cpu"), grad_x, probs.detach())
    for found, expected in ((z.grad, grad_z), (weight.grad, grad_weight), (probs.grad, probs_grad)):
        np.testing.assert_array_equal(array_of(found), array_of(expected))
    np.testing.assert_array_equal(o1.grad.numpy(), testing.from_bf16_bits(array_of(do1)).astype("float32"))


def test_one_tensor_as_two_inputs():
    inputs = testing.rmsnorm_silu_gate_inputs(6)
    x, weight = tensor_of(inputs["x"], "cpu"), tensor_of(inputs["weight"], "cpu")
    x.stop_gradient = False
    backward_into(F.cake_rmsnorm_silu_gate(x, x, weight), tensor_of(inputs["grad_out"], "cpu"))
    whole = {**inputs, "z": inputs["x"]}
    parts = testing.reference.cake_rmsnorm_silu_gate_train_backward(**whole)
    bound = sum(2 * testing.promise1_bound(getattr(parts, n), parts.magnitudes[n]) for n in ("grad_x", "grad_z"))
    error = np.abs(testing.from_bf16_bits(array_of(x.grad)) - parts.grad_x - parts.grad_z)
    assert (error <= bound + testing.bf16_ulp(parts.grad_x + parts.grad_z)).all()


@pytest.mark.parametrize("name", FORWARDS)
def test_gradients_add_up_over_calls(name):
    # What a second backward finds is added to, by Paddle in BF16 or FP32: twice the same is exact.
    forward, arrays = FORWARDS[name], FORWARDS[name].arrays(4)
    leaves = forward.leaves(arrays, "cpu")
    for _ in range(2):
        backward_into(forward.function(**leaves), tensor_of(arrays[forward.output_grad], "cpu"))
    for leaf, expected in forward.gradients(arrays, "cpu").items():
        found = testing.reference.to_float64(array_of(leaves[leaf].grad))
        np.testing.assert_array_equal(found, 2 * testing.reference.to_float64(expected))


@pytest.mark.parametrize("name", ["o1", "unzipped_probs"])
def test_swiglu_input_written_to_before_the_backward(name):
    tensors = {n: t.detach() for n, t in tensors_of(testing.swiglu_weighted_inputs(3, 8), "cpu").items() if n != "do2_s"}
    tensors["o1"].stop_gradient = False
    output = F.fused_swiglu_weighted(**tensors)
    with paddle.no_grad():
        tensors[name].zero_()
    with pytest.raises(Exception, match=f"{name} was written to between forward and backward"):
        output.astype("float32").sum().backward()


@pytest.mark.parametrize("name", ["x", "z", "weight"])
def test_rmsnorm_input_written_to_before_the_backward(name):
    tensors = {n: t.detach() for n, t in tensors_of(testing.rmsnorm_silu_gate_inputs(3), "cpu").items() if n != "grad_out"}
    tensors["x"].stop_gradient = False
    output = F.cake_rmsnorm_silu_gate(**tensors)
    with paddle.no_grad():
        tensors[name].zero_()
    with pytest.raises(Exception, match=f"{name} was written to between forward and backward"):
        output.astype("float32").sum().backward()
