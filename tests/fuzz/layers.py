"""The layers, made and called with whatever may come."""

import numpy as np
import paddle
from hypothesis import strategies as st

import paddle_gated_ops.incubate.nn.functional as F
from calls import array_of, tensor_of
from fuzz.call import Call
from fuzz.foreign import NO_DENSE_TENSORS, NO_TENSORS
from fuzz.ops import BAD_EPSILONS, EPSILONS, leading_shapes
from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn import RMSNormSiLUGate, WeightedSwiGLUExperts

NO_INTS = [None, "3", 2.0, True, [2], np.float32(2), object(), paddle.ones([1])]
NO_ATTRS = [False, 3, 1.5, [1], object()]


def make_layer(draw, layer, good, bad):
    """The layer from drawn arguments; None where they were refused, rightly.

    Args:
        good, bad: {name: values}.
    """
    arguments = {name: draw(st.sampled_from(values)) for name, values in good.items()}
    broken = draw(st.sampled_from([None] * 6 + sorted(bad)))
    if broken:
        arguments[broken] = draw(st.sampled_from(bad[broken]))
    try:
        made = layer(**arguments)
    except (TypeError, ValueError) as error:
        assert broken and f"{layer.__name__}: {broken} " in str(error), f"{arguments}: {error}"
        return None
    assert not broken, f"should have been refused: {arguments}"
    return made


def rmsnorm_layer(draw):
    good = {"hidden_size": [128], "epsilon": EPSILONS, "weight_attr": [None, paddle.ParamAttr()]}
    bad = {"hidden_size": [*NO_INTS, 127, 0, -128, 2**70], "epsilon": BAD_EPSILONS, "weight_attr": NO_ATTRS}
    layer = make_layer(draw, RMSNormSiLUGate, good, bad)
    if layer is None:
        return
    call = Call(draw, "cake_rmsnorm_silu_gate", ["x", "z"], base="x")
    call.place, call.mixes_places = "cpu", False  # its weight's cast to BF16 is a kernel of Paddle's
    shape = draw(leading_shapes()) + (128,)
    found = call.tensor("x", "bfloat16", shape), call.tensor("z", "bfloat16", shape)
    if found[0] is not None:
        call.shape_fault(found[0][-1:] == (128,), "x")
        call.shape_fault(found[1] in (None, found[0]))
    output = call.run(layer)
    if output is None:
        return
    inputs = {**call.inputs(["x", "z"]), "weight": testing.to_bf16_bits(np.ones(128))}
    testing.assert_rmsnorm_silu_gate(inputs, array_of(output.detach()), float(layer._epsilon))
    if output.stop_gradient:
        assert not call.grad_enabled
        return
    inputs["grad_out"] = testing.rmsnorm_silu_gate_inputs(tuple(output.shape[:-1]), call.seed)["grad_out"]
    paddle.autograd.backward([output], [tensor_of(inputs["grad_out"], "cpu")])
    expected = tensor_of(np.zeros(128, np.float32), "cpu")
    tensors = {name: tensor_of(array, "cpu") for name, array in inputs.items()}
    F.cake_rmsnorm_silu_gate_train_backward(**tensors, eps=layer._epsilon, grad_weight=expected)
    np.testing.assert_array_equal(array_of(layer.weight.grad), array_of(expected))


COUNTS = st.lists(st.integers(0, 7), min_size=3, max_size=3)
NO_COUNTS = [None, 3, "abc", [], [1, 2], [-1, 1, 0], [10**30, 0, 0], [1.0, 0, 0], [True, 0, 0], {}, np.ones(3)]
NO_COUNTS += [np.ones((3, 1), int), paddle.ones([3]), paddle.ones([3, 1], "int32"), paddle.Tensor()]


def experts_layer(draw):
    """Small whole numbers and one down projection per column make the products exact, so the activation's bound holds."""
    sizes = {"num_experts": [3], "hidden_size": [5], "intermediate_size": [5]}
    bad = {name: [*NO_INTS, 0, -1] for name in sizes}
    layer = make_layer(draw, WeightedSwiGLUExperts, {**sizes, "weight_attr": [None]}, {**bad, "weight_attr": NO_ATTRS})
    if layer is None:
        return
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    up_gate = generator.integers(-2, 3, (3, 5, 10)).astype(np.float32)
    down = np.stack([np.eye(5)[generator.permutation(5)] for _ in range(3)]).astype(np.float32)
    layer.up_gate_proj.set_value(paddle.to_tensor(up_gate))
    layer.down_proj.set_value(paddle.to_tensor(down))

    counts = draw(COUNTS)
    rows = sum(counts)
    call = Call(draw, "WeightedSwiGLUExperts", ["tokens", "unzipped_probs", "tokens_per_expert"], base="tokens")
    call.kinds = ["whole"]
    call.place, call.mixes_places = "cpu", False
    tokens = call.tensor("tokens", "float32", (rows, 5))
    probs = call.tensor("unzipped_probs", "float32", (rows, *draw(st.sampled_from([(), (1,)]))))
    if tokens is not None:
        right = len(tokens) == 2 and tokens[1] == 5
        call.shape_fault(right, "tokens")
        if right:
            call.shape_fault(probs in (None, tokens[:1], (tokens[0], 1)))
            if tokens[0] != rows:
                call.faults.append({"tokens", "tokens_per_expert"})
    forms = [counts, tuple(counts), np.array(counts), np.array(counts, np.uint8), paddle.to_tensor(counts)]
    odd = [make(np.ones(3)) for make in {**NO_TENSORS, **NO_DENSE_TENSORS}.values()]
    call.number("tokens_per_expert", forms, NO_COUNTS + odd + [[each] * 3 for each in odd])

    output = call.run(layer)
    if output is None:
        return
    inputs = call.inputs(["tokens", "unzipped_probs"])
    expert = np.repeat(np.arange(3), counts)
    o1 = testing.to_bf16_bits(np.einsum("ri,rio->ro", inputs["tokens"], up_gate[expert]))
    o2_s = np.einsum("ro,rio->ri", output.numpy(), down[expert])
    swiglu = {"o1": o1, "unzipped_probs": inputs["unzipped_probs"]}
    testing.assert_swiglu_weighted(swiglu, testing.to_bf16_bits(o2_s))
    assert output.stop_gradient == (not call.grad_enabled)
    if output.stop_gradient:
        return

    grad = generator.integers(-2, 3, (rows, 5)).astype(np.float32)
    paddle.autograd.backward([output], [paddle.to_tensor(grad)])
    swiglu["do2_s"] = testing.to_bf16_bits(np.einsum("ro,rio->ri", grad, down[expert]))
    do1, probs_grad, _ = F.fused_swiglu_weighted_bwd(**{name: tensor_of(array, "cpu") for name, array in swiglu.items()})
    grads = {name: call.tensors[name].grad for name in ("tokens", "unzipped_probs")}
    for name, found in grads.items():
        assert (found is not None) == call.views[name].trainable, name
    if grads["unzipped_probs"] is not None:
        np.testing.assert_array_equal(array_of(grads["unzipped_probs"]), array_of(probs_grad))
    do1 = testing.from_bf16_bits(array_of(do1))
    expected_sums(layer.up_gate_proj.grad, expert, inputs["tokens"], do1)
    expected_sums(layer.down_proj.grad, expert, testing.from_bf16_bits(testing.to_bf16_bits(o2_s)), grad)
    if grads["tokens"] is not None:
        terms = do1[:, None, :] * up_gate[expert]
        assert_sum(grads["tokens"].numpy(), terms, axis=-1)


def expected_sums(found, expert, left, right):
    """Each expert's left.T @ right."""
    for number in range(3):
        mine = expert == number
        assert_sum(found[number].numpy(), left[mine][:, :, None] * right[mine][:, None, :], axis=0)


def assert_sum(found, terms, axis):
    """An FP32 sum in any order: each of its additions errs by 2^-24 of the magnitudes' sum at most, as does one product."""
    bound = (terms.shape[axis] + 1) * 2.0**-24 * np.abs(terms).sum(axis)
    assert (np.abs(found - terms.sum(axis)) <= bound).all()


LAYERS = {"RMSNormSiLUGate": rmsnorm_layer, "WeightedSwiGLUExperts": experts_layer}
