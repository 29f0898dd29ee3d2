"""Bad calls: the right exception, the argument's name in its message, and nothing written."""

from fractions import Fraction

import numpy as np
import paddle
import pytest

import paddle_gated_ops
import paddle_gated_ops.incubate.nn.functional as F
from calls import array_of, raw, tensor_of, tensors_of
from paddle_gated_ops import testing

ROWS, WIDTH = 4, 7


def bf16(*shape):
    return lambda place: tensor_of(np.full(shape, 0x3F80, np.uint16), place)


def fp32(*shape):
    return lambda place: tensor_of(np.ones(shape, np.float32), place)


def of_dtype(dtype, *shape):
    return lambda place: paddle.to_tensor(np.ones(shape, dtype), place=place)


def no_tensors(*shape):
    return [None, 3, 1.5, "x", [1.0], np.ones(shape, np.float32), object()]


def without_memory(place):
    return paddle.Tensor()


def without_content(place):
    return paddle.Tensor.__new__(paddle.Tensor)



# ---- fused_swiglu_weighted_bwd: argument, what is passed instead

SWIGLU_TYPES = [(name, value) for name in ("o1", "do2_s", "unzipped_probs") for value in no_tensors(ROWS, WIDTH)]

SWIGLU_VALUES = {
    "o1 FP16": ("o1", of_dtype("float16", ROWS, 2 * WIDTH)),
    "o1 FP32": ("o1", fp32(ROWS, 2 * WIDTH)),
    "o1 FP64": ("o1", of_dtype("float64", ROWS, 2 * WIDTH)),
    "o1 INT16": ("o1", of_dtype("int16", ROWS, 2 * WIDTH)),
    "o1 with an odd last dimension": ("o1", bf16(ROWS, 2 * WIDTH - 1)),
    "o1 without dimensions": ("o1", bf16()),
    "o1 without memory": ("o1", without_memory),
    "o1 without content": ("o1", without_content),
    "probs without content": ("unzipped_probs", without_content),
    "do2_s FP16": ("do2_s", of_dtype("float16", ROWS, WIDTH)),
    "do2_s FP32": ("do2_s", fp32(ROWS, WIDTH)),
    "do2_s with fewer rows": ("do2_s", bf16(ROWS - 1, WIDTH)),
    "do2_s with one row": ("do2_s", bf16(1, WIDTH)),
    "do2_s of o1's width": ("do2_s", bf16(ROWS, 2 * WIDTH)),
    "do2_s with another column": ("do2_s", bf16(ROWS, WIDTH + 1)),
    "do2_s of another rank": ("do2_s", bf16(ROWS * WIDTH)),
    "do2_s of more dimensions": ("do2_s", bf16(1, ROWS, WIDTH)),
    "do2_s transposed": ("do2_s", bf16(WIDTH, ROWS)),
    "do2_s without elements": ("do2_s", bf16(0, WIDTH)),
    "do2_s without memory": ("do2_s", without_memory),
    "probs BF16": ("unzipped_probs", bf16(ROWS)),
    "probs FP16": ("unzipped_probs", of_dtype("float16", ROWS)),
    "probs FP64": ("unzipped_probs", of_dtype("float64", ROWS)),
    "probs INT32": ("unzipped_probs", of_dtype("int32", ROWS)),
    "too few probs": ("unzipped_probs", fp32(ROWS - 1)),
    "too many probs": ("unzipped_probs", fp32(ROWS + 1)),
    "one prob": ("unzipped_probs", fp32(1)),
    "a scalar prob": ("unzipped_probs", fp32()),
    "two probs a row": ("unzipped_probs", fp32(ROWS, 2)),
    "probs as a row": ("unzipped_probs", fp32(1, ROWS)),
    "probs with two more dimensions": ("unzipped_probs", fp32(ROWS, 1, 1)),
    "a prob an element": ("unzipped_probs", fp32(ROWS, WIDTH)),
    "no probs": ("unzipped_probs", fp32(0)),
    "probs without memory": ("unzipped_probs", without_memory),
}


def call_swiglu(place, name, make):
    tensors = tensors_of(testing.swiglu_weighted_inputs(ROWS, WIDTH), place)
    tensors[name] = make(place)
    return F.fused_swiglu_weighted_bwd(**tensors)


@pytest.mark.parametrize("name, value", SWIGLU_TYPES)
def test_swiglu_type(place, name, value):
    with pytest.raises(TypeError, match=rf"fused_swiglu_weighted_bwd: {name}\b"):
        call_swiglu(place, name, lambda place: value)


@pytest.mark.parametrize("case", SWIGLU_VALUES)
def test_swiglu_value(place, case):
    name, make = SWIGLU_VALUES[case]
    with pytest.raises(ValueError, match=rf"fused_swiglu_weighted_bwd: {name}\b"):
        call_swiglu(place, name, make)


def test_swiglu_message_names_what_was_expected_and_what_came(place):
    with pytest.raises(ValueError, match=r"do2_s.*\[4, 7\].*\[3, 7\]"):
        call_swiglu(place, "do2_s", bf16(ROWS - 1, WIDTH))
    with pytest.raises(ValueError, match=r"o1.*bfloat16.*float16"):
        call_swiglu(place, "o1", of_dtype("float16", ROWS, 2 * WIDTH))
    with pytest.raises(TypeError, match=r"o1.*Tensor.*list"):
        call_swiglu(place, "o1", lambda place: [1.0])


@pytest.mark.parametrize("name", [None, "", "any", 3])
def test_swiglu_name_is_unused(place, name):
    tensors = tensors_of(testing.swiglu_weighted_inputs(ROWS, WIDTH), place)
    assert len(F.fused_swiglu_weighted_bwd(**tensors, name=name)) == 3


# ---- cake_rmsnorm_silu_gate_train_backward

RMSNORM_TYPES = [(name, value) for name in ("grad_out", "x", "z", "weight") for value in no_tensors(ROWS, 128)]
RMSNORM_TYPES += [
    (name, value)
    for name in ("grad_x", "grad_z", "grad_weight", "workspace")
    for value in no_tensors(ROWS, 128)
    if value is not None
]
RMSNORM_TYPES += [
    (name, value)
    for name in ("accumulate_grad_weight", "compute_grad_weight")
    for value in (None, 0, 1, 1.0, "yes", np.bool_(True), [True])
]
RMSNORM_TYPES += [("eps", value) for value in (None, "1e-6", True, False, [1e-6], 1e-6j, object())]

FULL = (ROWS, 128)
RMSNORM_VALUES = {
    **{f"{name} FP16": (name, of_dtype("float16", *FULL)) for name in ("grad_out", "x", "z", "grad_x", "grad_z")},
    **{f"{name} FP32": (name, fp32(*FULL)) for name in ("grad_out", "x", "z", "grad_x", "grad_z")},
    **{f"{name} with a row more": (name, bf16(ROWS + 1, 128)) for name in ("grad_out", "z", "grad_x", "grad_z")},
    **{f"{name} with one row": (name, bf16(1, 128)) for name in ("grad_out", "z", "grad_x", "grad_z")},
    **{f"{name} flat": (name, bf16(ROWS * 128)) for name in ("grad_out", "x", "z", "grad_x", "grad_z")},
    **{f"{name} transposed": (name, bf16(128, ROWS)) for name in ("grad_out", "x", "z", "grad_x", "grad_z")},
    **{f"{name} with a dimension more": (name, bf16(1, *FULL)) for name in ("grad_out", "z", "grad_x", "grad_z")},
    **{f"{name} with a column less": (name, bf16(ROWS, 127)) for name in ("grad_out", "x", "z", "grad_x", "grad_z")},
    **{f"{name} empty": (name, bf16(0, 128)) for name in ("grad_out", "z", "grad_x", "grad_z")},
    **{
        f"{name} without memory": (name, without_memory)
        for name in ("grad_out", "x", "z", "weight", "grad_x", "grad_z", "grad_weight", "workspace")
    },
    "x without dimensions": ("x", bf16()),
    "weight FP32": ("weight", fp32(128)),
    "weight FP16": ("weight", of_dtype("float16", 128)),
    "weight with a column more": ("weight", bf16(129)),
    "weight with one element": ("weight", bf16(1)),
    "weight without dimensions": ("weight", bf16()),
    "weight as a row": ("weight", bf16(1, 128)),
    "weight without elements": ("weight", bf16(0)),
    "grad_weight FP16": ("grad_weight", of_dtype("float16", 128)),
    "grad_weight FP64": ("grad_weight", of_dtype("float64", 128)),
    "grad_weight with a column less": ("grad_weight", fp32(127)),
    "grad_weight as a row": ("grad_weight", fp32(1, 128)),
    "grad_weight with one element": ("grad_weight", bf16(1)),
    "grad_weight of x's shape": ("grad_weight", bf16(*FULL)),
    "workspace BF16": ("workspace", bf16(1 << 20)),
    "workspace FP64": ("workspace", of_dtype("float64", 1 << 20)),
    "workspace INT32": ("workspace", of_dtype("int32", 1 << 20)),
    "workspace of one float": ("workspace", fp32(1)),
    "workspace empty": ("workspace", fp32(0)),
    "workspace with a stride": ("workspace", lambda place: fp32(1 << 12)(place)[::2]),
    "workspace backwards": ("workspace", lambda place: fp32(1 << 12)(place)[::-1]),
    "workspace transposed": ("workspace", lambda place: fp32(64, 64)(place).transpose([1, 0])),
    "workspace of one element": ("workspace", lambda place: paddle.as_strided(fp32(1)(place), [1 << 12], [0])),
    **{
        f"eps {type(value).__name__} {value}": ("eps", lambda place, value=value: value)
        for value in (-1e-6, -1.0, -1, -1e-60, 1e39, *map(float, ("nan", "inf", "-inf")))
    },
    "eps float64 -1": ("eps", lambda place: np.float64(-1)),
    "eps float32 nan": ("eps", lambda place: np.float32("nan")),
}


def outputs_of(place):
    """Every output and buffer that a caller can pass, with contents to recognize."""
    floats = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(ROWS, place) // 4
    return {
        "grad_x": tensor_of(np.full(FULL, 0x1234, np.uint16), place),
        "grad_z": tensor_of(np.full(FULL, 0x2345, np.uint16), place),
        "grad_weight": tensor_of(np.full(128, 3.25, np.float32), place),
        "workspace": tensor_of(np.full(floats, 4.5, np.float32), place),
    }


def check_rmsnorm_error(place, error, name, value, **options):
    """The call with ``value`` for ``name`` raises, names the argument, and leaves all that was passed as it was."""
    arguments = tensors_of(testing.rmsnorm_silu_gate_inputs(ROWS), place)
    arguments.update(outputs_of(place))
    arguments.update(options)
    arguments[name] = value
    others = {n: t for n, t in arguments.items() if n != name and isinstance(t, paddle.Tensor)}
    before = {n: raw(array_of(t)).copy() for n, t in others.items()}
    with pytest.raises(error, match=rf"cake_rmsnorm_silu_gate_train_backward: {name}\b"):
        F.cake_rmsnorm_silu_gate_train_backward(**arguments)
    for n, tensor in others.items():
        np.testing.assert_array_equal(raw(array_of(tensor)), before[n], err_msg=n)
        assert tensor.inplace_version == 0, n


@pytest.mark.parametrize("name, value", RMSNORM_TYPES)
def test_rmsnorm_type(place, name, value):
    check_rmsnorm_error(place, TypeError, name, value)


@pytest.mark.parametrize("case", RMSNORM_VALUES)
def test_rmsnorm_value(place, case):
    name, make = RMSNORM_VALUES[case]
    check_rmsnorm_error(place, ValueError, name, make(place))


@pytest.mark.parametrize("case", [case for case in RMSNORM_VALUES if case.startswith(("grad_weight", "workspace"))])
def test_what_is_not_used_is_checked_too(place, case):
    name, make = RMSNORM_VALUES[case]
    check_rmsnorm_error(place, ValueError, name, make(place), compute_grad_weight=False)


def test_eps_is_no_tensor(place):
    check_rmsnorm_error(place, TypeError, "eps", fp32()(place))


@pytest.mark.parametrize("eps, error", [
    (10**400, ValueError),
    (-(10**400), ValueError),
    (np.complex64(1), TypeError),
    (np.bool_(True), TypeError),
    (np.array(1e-6), TypeError),
    (1e-6 + 0j, TypeError),
])
def test_eps_is_a_real_number(eps, error):
    arguments = tensors_of(testing.rmsnorm_silu_gate_inputs(3), "cpu")
    with pytest.raises(error, match="^cake_rmsnorm_silu_gate_train_backward: eps "):
        F.cake_rmsnorm_silu_gate_train_backward(**arguments, eps=eps)


@pytest.mark.skipif(paddle.__version__.startswith("2.6"), reason="2.6's view to a wider dtype ends the process")
def test_memory_that_begins_between_two_items():
    """A workspace there would be written past its end, and a GPU would fault."""
    arguments = tensors_of(testing.rmsnorm_silu_gate_inputs(3), "cpu")
    size = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(3)
    late = paddle.to_tensor(np.zeros(size, np.uint16), dtype="bfloat16", place="cpu")[1 : 1 + size // 2].view("float32")
    assert late.data_ptr() % 4 != 0
    with pytest.raises(ValueError, match="workspace must begin at a multiple"):
        F.cake_rmsnorm_silu_gate_train_backward(**arguments, workspace=late)


@pytest.mark.parametrize("eps", [0, 0.0, 1, np.float32(1e-6), np.float64(1e-6), np.int64(1), Fraction(1, 1000)])
def test_eps_of_any_number_type(place, eps):
    inputs = testing.rmsnorm_silu_gate_inputs(ROWS)
    tensors = tensors_of(inputs, place)
    outputs = [array_of(tensor) for tensor in F.cake_rmsnorm_silu_gate_train_backward(**tensors, eps=eps)]
    for got, expected in zip(outputs, F.cake_rmsnorm_silu_gate_train_backward(**tensors, eps=float(eps))):
        np.testing.assert_array_equal(got, array_of(expected))
    outputs = dict(zip(("grad_x", "grad_z", "grad_weight"), outputs))
    testing.assert_rmsnorm_silu_gate_bwd(inputs, outputs, eps=float(eps))


@pytest.mark.parametrize("compute, grad_weight", [(True, None), (False, None), (False, fp32(128))])
def test_accumulation_without_anything_to_add_to(place, compute, grad_weight):
    check_rmsnorm_error(
        place,
        ValueError,
        "accumulate_grad_weight",
        True,
        compute_grad_weight=compute,
        grad_weight=grad_weight and grad_weight(place),
    )


def test_options_are_keywords(place):
    tensors = tensors_of(testing.rmsnorm_silu_gate_inputs(ROWS), place)
    with pytest.raises(TypeError):
        F.cake_rmsnorm_silu_gate_train_backward(*tensors.values(), 1e-6, bf16(*FULL)(place))
    with pytest.raises(TypeError, match="grad_y"):
        F.cake_rmsnorm_silu_gate_train_backward(**tensors, grad_y=None)


def test_a_sparse_tensor():
    dense = np.zeros(FULL, np.float32)
    sparse = paddle.to_tensor(dense, place="cpu").to_sparse_coo(2)
    check_rmsnorm_error("cpu", ValueError, "x", sparse)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["grad_out", "x", "z", "weight", "grad_x", "grad_z", "grad_weight", "workspace"])
def test_rmsnorm_mixed_places(name):
    arguments = {**tensors_of(testing.rmsnorm_silu_gate_inputs(ROWS), "cpu"), **outputs_of("cpu")}
    array = array_of(arguments[name])
    if name == "grad_out":  # the first argument decides the place, so that the second is named
        with pytest.raises(ValueError, match=r": x must be on"):
            F.cake_rmsnorm_silu_gate_train_backward(**{**arguments, name: tensor_of(array, "gpu:0")})
    else:
        check_rmsnorm_error("cpu", ValueError, name, tensor_of(array, "gpu:0"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["do2_s", "unzipped_probs"])
def test_swiglu_mixed_places(name):
    array = testing.swiglu_weighted_inputs(ROWS, WIDTH)[name]
    with pytest.raises(ValueError, match=rf"{name} must be on"):
        call_swiglu("cpu", name, lambda place: tensor_of(array, "gpu:0"))
    with pytest.raises(ValueError, match=rf"{name} must be on"):
        call_swiglu("gpu:0", name, lambda place: tensor_of(array, "cpu"))


@pytest.mark.gpu
def test_pinned_memory():
    array = testing.swiglu_weighted_inputs(ROWS, WIDTH)["o1"]
    with pytest.raises(ValueError, match="o1 must be on"):
        call_swiglu("gpu:0", "o1", lambda place: tensor_of(array, "cpu").pin_memory())


# ---- The number of threads


@pytest.mark.parametrize("n", [None, True, "2", 2.0, [2], np.float32(2)])
def test_threads_type(n):
    before = paddle_gated_ops.get_num_threads()
    with pytest.raises(TypeError, match=r"set_num_threads: n\b"):
        paddle_gated_ops.set_num_threads(n)
    assert paddle_gated_ops.get_num_threads() == before


@pytest.mark.parametrize("n", [0, -1, 1025, 2**70])
def test_threads_value(n):
    before = paddle_gated_ops.get_num_threads()
    with pytest.raises(ValueError, match=r"set_num_threads: n\b"):
        paddle_gated_ops.set_num_threads(n)
    assert paddle_gated_ops.get_num_threads() == before
