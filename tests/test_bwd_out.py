"""fused_swiglu_weighted_bwd_out: the same results into the caller's tensors, which may take the inputs' memory."""

import inspect

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import SWIGLU_INPUTS, array_of, assert_same_bits, peak_of, run_swiglu, tensor_of, tensors_of
from paddle_gated_ops import testing

OUTPUTS = ("do1", "probs_grad", "o2_s")
LIKE = {"do1": "o1", "probs_grad": "unzipped_probs", "o2_s": "do2_s"}
KINDS = [kind for kind in testing.VIEW_KINDS if kind != "broadcast_row"]
LEAD, WIDTH = (3, 5), 12


@pytest.fixture
def inputs():
    return testing.swiglu_weighted_inputs(LEAD, WIDTH, seed=1)


def poison(array):
    return np.full_like(array, 0x7FC0 if array.dtype == np.uint16 else np.nan)


def outputs_of(inputs, place, names=OUTPUTS):
    return {name: tensor_of(poison(inputs[LIKE[name]]), place) for name in names}


def run(tensors, **outputs):
    return dict(zip(OUTPUTS, F.fused_swiglu_weighted_bwd_out(**tensors, **outputs)))


def arrays_of(outputs):
    return {name: array_of(tensor) for name, tensor in outputs.items()}


def test_signature():
    parameters = inspect.signature(F.fused_swiglu_weighted_bwd_out).parameters
    assert list(parameters) == [*SWIGLU_INPUTS, *OUTPUTS]
    for name in OUTPUTS:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY and parameters[name].default is None


@pytest.mark.parametrize("names", [[n for i, n in enumerate(OUTPUTS) if chosen >> i & 1] for chosen in range(8)])
def test_the_callers_tensors_are_returned(place, inputs, names):
    tensors, given = tensors_of(inputs, place), outputs_of(inputs, place, names)
    returned = run(tensors, **given)
    for name, tensor in returned.items():
        assert (tensor is given[name]) if name in names else tensor.is_contiguous()
        assert tensor.inplace_version == (1 if name in names else 0) and tensor.stop_gradient
    assert_same_bits(arrays_of(returned), run_swiglu(inputs, place))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(array_of(tensor), inputs[name])
        assert tensor.inplace_version == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OUTPUTS)
def test_views(place, inputs, name, kind):
    expected = run_swiglu(inputs, place)
    view, base = testing.strided_view(poison(inputs[LIKE[name]]), kind, place)
    returned = run(tensors_of(inputs, place), **{name: view})
    assert returned[name] is view
    np.testing.assert_array_equal(testing.read_view(view, base), expected[name])
    assert testing.damaged_canaries(view, base) == 0
    assert_same_bits(*({n: a for n, a in outputs.items() if n != name} for outputs in (
        {**expected, **arrays_of({n: t for n, t in returned.items() if n != name})}, expected)))


@pytest.mark.parametrize("kind", ["contiguous", "step2", "transposed", "offset", "reversed"])
@pytest.mark.parametrize("rows", [5, 700])
def test_in_the_inputs_memory(place, rows, kind):
    inputs = testing.swiglu_weighted_inputs(rows, 260, seed=rows)
    expected = run_swiglu(inputs, place)
    tensors, bases = tensors_of(inputs, place), {}
    for name in ("o1", "do2_s"):
        tensors[name], bases[name] = testing.strided_view(inputs[name], kind, place)
    returned = run(tensors, do1=tensors["o1"], o2_s=tensors["do2_s"])
    assert returned["do1"] is tensors["o1"] and returned["o2_s"] is tensors["do2_s"]
    for name, source in (("do1", "o1"), ("o2_s", "do2_s")):
        np.testing.assert_array_equal(testing.read_view(tensors[source], bases[source]), expected[name])
        assert testing.damaged_canaries(tensors[source], bases[source]) == 0
        assert tensors[source].inplace_version == 1
    np.testing.assert_array_equal(array_of(returned["probs_grad"]), expected["probs_grad"])


@pytest.mark.parametrize("name, source", [("do1", "o1"), ("o2_s", "do2_s")])
def test_one_of_them_in_an_inputs_memory(place, inputs, name, source):
    tensors = tensors_of(inputs, place)
    same = tensors[source].detach()  # another object over the same memory
    returned = run(tensors, **{name: same})
    assert returned[name] is same
    assert_same_bits(arrays_of(returned), run_swiglu(inputs, place))


def test_no_memory_but_for_probs_grad():
    tensors = tensors_of(testing.swiglu_weighted_inputs(2000, 64), "cpu")
    peak = peak_of(lambda: run(tensors, do1=tensors["o1"], o2_s=tensors["do2_s"]))
    assert 4 * 2000 <= peak < 4 * 2000 + 1024


# ---- Refused

OVERLAPS = {
    "do1 one row after o1": ("do1", "o1"),
    "o2_s one row after do2_s": ("o2_s", "do2_s"),
}


@pytest.mark.parametrize("name, source", OVERLAPS.values(), ids=OVERLAPS)
def test_a_shifted_view_of_the_input(place, name, source):
    inputs = testing.swiglu_weighted_inputs(4, 6)
    whole = np.concatenate([inputs[source], inputs[source][:1]])
    base = tensor_of(whole, place)
    tensors = {**tensors_of(inputs, place), source: base[:4]}
    with pytest.raises(ValueError, match=rf"^fused_swiglu_weighted_bwd_out: {name} must be exactly the memory of {source}"):
        run(tensors, **{name: base[1:]})
    np.testing.assert_array_equal(array_of(base), whole)


@pytest.mark.parametrize("name, other", [
    ("do1", "do2_s"),
    ("do1", "unzipped_probs"),
    ("o2_s", "o1"),
    ("o2_s", "unzipped_probs"),
    ("probs_grad", "o1"),
    ("probs_grad", "do2_s"),
    ("probs_grad", "unzipped_probs"),
    ("do1", "o2_s"),
    ("do1", "probs_grad"),
    ("o2_s", "probs_grad"),
])
def test_shared_memory_is_refused(place, inputs, name, other):
    # Both in one buffer of bytes, the second beginning inside the first.
    tensors, given = tensors_of(inputs, place), outputs_of(inputs, place)
    buffer = tensor_of(np.zeros(4096, np.float32), place)

    def part(argument):
        like = LIKE.get(argument, argument)
        shape, wide = list(inputs[like].shape), inputs[like].dtype == np.float32
        memory = buffer if wide else buffer.view("bfloat16")
        strides = np.cumprod([1, *shape[:0:-1]])[::-1].tolist()
        return paddle.as_strided(memory, shape, strides, 4)

    arguments = {**tensors, **given}
    arguments[name], arguments[other] = part(name), part(other)
    if name == "probs_grad" and other == "unzipped_probs":
        arguments[name] = arguments[other]  # even the same memory
    with pytest.raises(ValueError, match=rf"^fused_swiglu_weighted_bwd_out: {name} must not share memory with {other}"):
        F.fused_swiglu_weighted_bwd_out(**arguments)
    assert not array_of(buffer).any()
    for output in OUTPUTS:
        if output not in (name, other):
            np.testing.assert_array_equal(array_of(given[output]), poison(inputs[LIKE[output]]))


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_overlaps_itself(place, inputs, name):
    shape = list(inputs[LIKE[name]].shape)
    output = paddle.as_strided(tensor_of(poison(inputs[LIKE[name]]), place), shape, [0] * (len(shape) - 1) + [1])
    with pytest.raises(ValueError, match=rf"^fused_swiglu_weighted_bwd_out: {name} must have a place of its own"):
        run(tensors_of(inputs, place), **{name: output})


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_trainable_leaf(place, inputs, name):
    tensors, given = tensors_of(inputs, place), outputs_of(inputs, place)
    given[name].stop_gradient = False
    with pytest.raises(ValueError, match=rf"^fused_swiglu_weighted_bwd_out: {name} is a leaf with stop_gradient=False"):
        run(tensors, **given)
    for output, tensor in given.items():
        np.testing.assert_array_equal(array_of(tensor.detach()), poison(inputs[LIKE[output]]))
    with paddle.no_grad():
        returned = run(tensors, **given)
    assert returned[name] is given[name]
    assert_same_bits({n: array_of(t.detach()) for n, t in given.items()}, run_swiglu(inputs, place))


WRONG = {
    "do1": [np.zeros((3, 5, 24), np.float32), np.zeros((3, 5, 12), np.uint16), np.zeros((15, 24), np.uint16)],
    "probs_grad": [np.zeros((3, 5), np.uint16), np.zeros((3, 5, 1), np.float32), np.zeros(15, np.float32)],
    "o2_s": [np.zeros((3, 5, 12), np.float32), np.zeros((3, 5, 24), np.uint16), np.zeros((5, 3, 12), np.uint16)],
}


@pytest.mark.parametrize("name, array", [(name, array) for name, arrays in WRONG.items() for array in arrays])
def test_wrong_outputs(place, inputs, name, array):
    given = outputs_of(inputs, place)
    given[name] = tensor_of(array, place)
    with pytest.raises(ValueError, match=rf"^fused_swiglu_weighted_bwd_out: {name} must have "):
        run(tensors_of(inputs, place), **given)
    for output in OUTPUTS:
        if output != name:
            np.testing.assert_array_equal(array_of(given[output]), poison(inputs[LIKE[output]]))


@pytest.mark.parametrize("value", [3, "x", np.zeros((3, 5), np.float32)], ids=["int", "str", "array"])
@pytest.mark.parametrize("name", (*SWIGLU_INPUTS, *OUTPUTS))
def test_no_tensor(place, inputs, name, value):
    arguments = {**tensors_of(inputs, place), name: value}
    with pytest.raises(TypeError, match=rf"^fused_swiglu_weighted_bwd_out: {name} must be a paddle.Tensor"):
        F.fused_swiglu_weighted_bwd_out(**arguments)


@pytest.mark.parametrize("name", SWIGLU_INPUTS)
def test_none_is_no_input(place, inputs, name):
    with pytest.raises(TypeError, match=rf"^fused_swiglu_weighted_bwd_out: {name} must be a paddle.Tensor"):
        F.fused_swiglu_weighted_bwd_out(**{**tensors_of(inputs, place), name: None})


@pytest.mark.parametrize("lead, width", [((0,), 8), ((4, 0), 8), ((4,), 0)])
def test_empty(place, lead, width):
    inputs = testing.swiglu_weighted_inputs(lead, width)
    given = outputs_of(inputs, place)
    returned = run(tensors_of(inputs, place), **given)
    for name in OUTPUTS:
        assert returned[name] is given[name]
    assert not array_of(given["probs_grad"]).any()


def test_it_is_for_eager_mode():
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            o1 = paddle.static.data("o1", [4, 16], "bfloat16")
            do2_s = paddle.static.data("do2_s", [4, 8], "bfloat16")
            probs = paddle.static.data("unzipped_probs", [4], "float32")
            with pytest.raises(ValueError, match="fused_swiglu_weighted_bwd_out .*static graph"):
                F.fused_swiglu_weighted_bwd_out(o1, do2_s, probs)
    finally:
        paddle.disable_static()


@pytest.mark.skipif(int(paddle.__version__.split(".")[0]) < 3, reason="needs Paddle 3")
def test_no_dist_tensors(inputs):
    import paddle.distributed as dist

    tensors = tensors_of(inputs, "cpu")
    tensors["o1"] = dist.shard_tensor(tensors["o1"], dist.ProcessMesh([0], dim_names=["data"]), [dist.Replicate()])
    with pytest.raises(ValueError, match="fused_swiglu_weighted_bwd_out takes no DistTensor"):
        F.fused_swiglu_weighted_bwd_out(**tensors)
