"""The functions in a static program: refused when it is built, refused when it runs, or right."""

import re

import numpy as np
import paddle
from hypothesis import strategies as st

import paddle_gated_ops.incubate.nn.functional as F
from calls import eager, tensor_of
from fuzz.call import record
from fuzz.foreign import NO_TENSORS
from fuzz.memory import WRONG_DTYPES
from paddle_gated_ops import testing

FUNCTIONS = {
    "fused_swiglu_weighted": ("o1", "unzipped_probs"),
    "fused_swiglu_weighted_bwd": ("o1", "do2_s", "unzipped_probs"),
    "cake_rmsnorm_silu_gate": ("x", "z", "weight"),
    "cake_rmsnorm_silu_gate_train_backward": ("grad_out", "x", "z", "weight"),
}
BASES = {"o1": {"o1", "do2_s", "unzipped_probs"}, "x": {"grad_out", "x", "z"}}  # the others' shapes follow from these
# Not a variable of a deleted program: to be one is to be of the program, and Paddle cannot tell either.
FOREIGN = sorted({*NO_TENSORS} - {"a variable", "a variable of a deleted program"})


def program(draw):
    function = draw(st.sampled_from(sorted(FUNCTIONS)))
    names = FUNCTIONS[function]
    lead = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    if "o1" in names:
        arrays = testing.swiglu_weighted_inputs(lead, draw(st.integers(0, 20)), seed=draw(st.integers(0, 99)))
    else:
        arrays = testing.rmsnorm_silu_gate_inputs(lead, seed=draw(st.integers(0, 99)))
    arrays = {name: arrays[name] for name in names}
    broken = draw(st.sampled_from([None, None, *names]))
    how = broken and draw(st.sampled_from(["foreign", "a tensor", "dtype", "shape"]))
    dtypes = {name: "float32" if name == "unzipped_probs" else "bfloat16" for name in names}
    if how == "dtype":
        dtypes[broken] = draw(st.sampled_from(WRONG_DTYPES[:6]))
    if how == "shape":
        arrays[broken] = np.concatenate([arrays[broken].reshape(-1), np.ones(1, arrays[broken].dtype)])
        if broken == "unzipped_probs" and lead == ():
            arrays[broken] = np.ones((2,), np.float32)
    accused = BASES.get(broken, {broken})

    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            variables = {}
            for name, array in arrays.items():
                shape = [-1 if draw(st.booleans()) else size for size in array.shape]
                variables[name] = paddle.static.data(name, shape, dtypes[name])
            with eager():
                if how == "foreign":
                    variables[broken] = NO_TENSORS[draw(st.sampled_from(FOREIGN))](arrays[broken])
                if how == "a tensor":
                    variables[broken] = tensor_of(arrays[broken], "cpu")
            record(f"{function}({dict((n, (a.shape, dtypes[n])) for n, a in arrays.items())}, {how}: {broken})")
            outputs = expect_error(function, accused, lambda: getattr(F, function)(**variables), how)
            if outputs is None:
                return
            assert how in (None, "shape"), f"should have been refused: {broken}, {how}"
            outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
            executor, main = paddle.static.Executor(paddle.CPUPlace()), paddle.static.default_main_program()
            feed = {name: np.array(array, order="C") for name, array in arrays.items()}
            found = expect_error(function, accused, lambda: executor.run(main, feed=feed, fetch_list=outputs), how)
            if found is not None:
                assert how is None, f"should have been refused: {broken}, {how}"
                check(function, arrays, found)
    finally:
        paddle.disable_static(paddle.CPUPlace())  # else the first GPU would be the current device


def expect_error(function, accused, call, how):
    """What the call returns, or None where it was refused, rightly."""
    try:
        return call()
    except (TypeError, ValueError) as error:
        found = re.search(rf"\b{function}: .*?\b({'|'.join(sorted(accused))})\b", str(error), re.S)
        assert how and found, f"{how} of {accused}: {error}"
        return None


def check(function, arrays, found):
    if function == "fused_swiglu_weighted":
        testing.assert_swiglu_weighted(arrays, found[0])
    elif function == "fused_swiglu_weighted_bwd":
        testing.assert_swiglu_weighted_bwd(arrays, dict(zip(("do1", "probs_grad", "o2_s"), found)))
    elif function == "cake_rmsnorm_silu_gate":
        testing.assert_rmsnorm_silu_gate(arrays, found[0])
    else:
        testing.assert_rmsnorm_silu_gate_bwd(arrays, dict(zip(("grad_x", "grad_z", "grad_weight"), found)))
