"""The functions that take no tensor."""

import numpy as np
import paddle
from hypothesis import strategies as st

import paddle_gated_ops
import paddle_gated_ops.incubate.nn.functional as F

NO_INTS = [None, "3", 2.0, True, [2], np.float32(2), 1j, object(), paddle.float32]


def refused(call, name, *arguments):
    """Whether the call is refused with an error that names the argument; other errors pass through."""
    try:
        call(*arguments)
    except (TypeError, ValueError) as error:
        assert f"{call.__name__}: {name} " in str(error), error
        return True
    return False


def workspace_bytes(draw):
    size = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes
    rows = draw(st.integers(-3, 20) | st.integers(-(2**70), 2**70) | st.integers(0, 2**22))
    if not 0 <= rows < 2**63:
        assert refused(size, "rows", rows)
        return
    place = draw(st.sampled_from([None, "cpu", paddle.CPUPlace()]))
    found = size(draw(st.sampled_from([rows, np.int64(rows)])), place)
    assert found % 4 == 0 and found >= size(max(rows - 1, 0)) and found >= (0 if rows == 0 else 4)
    assert refused(size, "rows", draw(st.sampled_from(NO_INTS)))
    for place in ("tpu", "gpu:x", 3, object(), paddle.float32, b"cpu"):
        assert refused(size, "place", rows, place)


def num_threads(draw):
    before = paddle_gated_ops.get_num_threads()
    try:
        number = draw(st.integers(-5, 1030) | st.integers(-(2**70), 2**70))
        if 1 <= number <= 1024:
            paddle_gated_ops.set_num_threads(draw(st.sampled_from([number, np.int32(number)])))
            assert paddle_gated_ops.get_num_threads() == number
        else:
            assert refused(paddle_gated_ops.set_num_threads, "n", number)
        assert refused(paddle_gated_ops.set_num_threads, "n", draw(st.sampled_from(NO_INTS)))
    finally:
        paddle_gated_ops.set_num_threads(before)


NUMBERS = {"workspace_bytes": workspace_bytes, "num_threads": num_threads}
