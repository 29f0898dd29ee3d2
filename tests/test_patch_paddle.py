"""patch_paddle puts the library's function under Paddle's own name, and takes it away again."""

import threading

import paddle
import paddle.incubate.nn.functional as paddle_functional
import pytest

import paddle_gated_ops
from calls import SWIGLU_INPUTS, array_of, assert_same_bits, run_python, run_swiglu, tensors_of
from paddle_gated_ops import _patch, testing
from paddle_gated_ops.incubate.nn import functional as F

NAME = "fused_swiglu_weighted_bwd"


def paddles_own(*arguments):
    raise AssertionError("Paddle's own function was called")


@pytest.fixture(params=["Paddle has the name", "Paddle lacks the name"])
def before(request, monkeypatch):
    """What Paddle has under the name, None for nothing. The test must leave it so."""
    if request.param == "Paddle has the name":
        monkeypatch.setattr(paddle_functional, NAME, paddles_own, raising=False)
        yield paddles_own
    else:
        monkeypatch.delattr(paddle_functional, NAME, raising=False)
        yield None
    assert current() is (paddles_own if request.param == "Paddle has the name" else None)


def current():
    return getattr(paddle_functional, NAME, None)


def test_function(before):
    patch = paddle_gated_ops.patch_paddle()
    assert current() is F.fused_swiglu_weighted_bwd
    patch.restore()
    assert current() is before
    assert hasattr(paddle_functional, NAME) == (before is not None)
    patch.restore()
    assert current() is before


def test_context_manager(before):
    with paddle_gated_ops.patch_paddle() as patch:
        assert current() is F.fused_swiglu_weighted_bwd
        assert hasattr(patch, "restore")
    assert current() is before


def test_restored_after_an_exception(before):
    with pytest.raises(KeyError), paddle_gated_ops.patch_paddle():
        raise KeyError
    assert current() is before


def test_nested(before):
    with paddle_gated_ops.patch_paddle():
        with paddle_gated_ops.patch_paddle():
            assert current() is F.fused_swiglu_weighted_bwd
        assert current() is F.fused_swiglu_weighted_bwd
    assert current() is before


def test_restored_in_any_order(before):
    first, second = paddle_gated_ops.patch_paddle(), paddle_gated_ops.patch_paddle()
    first.restore()
    first.restore()  # the second's is not its to undo
    assert current() is F.fused_swiglu_weighted_bwd
    second.restore()
    assert current() is before


def test_restore_inside_the_block(before):
    with paddle_gated_ops.patch_paddle() as patch:
        patch.restore()
        assert current() is before
    assert current() is before


def test_a_restored_patch_patches_again_in_a_block(before):
    patch = paddle_gated_ops.patch_paddle()
    for _ in range(2):
        patch.restore()
        with patch:
            assert current() is F.fused_swiglu_weighted_bwd
        assert current() is before


def test_what_somebody_else_put_there_stays(before):
    def another(*arguments):
        raise AssertionError("not to be called")

    with paddle_gated_ops.patch_paddle():
        setattr(paddle_functional, NAME, another)
    assert current() is another
    if before is None:
        delattr(paddle_functional, NAME)
    else:
        setattr(paddle_functional, NAME, before)
    with paddle_gated_ops.patch_paddle():
        pass
    assert current() is before


def test_a_deleted_name_stays_deleted(before):
    with paddle_gated_ops.patch_paddle():
        delattr(paddle_functional, NAME)
    assert not hasattr(paddle_functional, NAME)
    if before is not None:
        setattr(paddle_functional, NAME, before)


class Interrupted:
    """Stands in for Paddle's module. Behind one access to it, by number, another thread makes a patch, if it can."""

    def __init__(self, number):
        vars(self).update(left=number, patches=[], thread=None)

    def _accessed(self):
        if self.thread is not None:
            return
        if self.left > 0:
            vars(self)["left"] -= 1
            return
        vars(self)["thread"] = threading.Thread(target=lambda: self.patches.append(paddle_gated_ops.patch_paddle()))
        self.thread.start()
        self.thread.join(0.2)  # it may have to wait for this one

    def __getattr__(self, name):
        value = getattr(paddle_functional, name, None)
        self._accessed()
        if value is None:
            raise AttributeError(name)
        return value

    def __setattr__(self, name, value):
        setattr(paddle_functional, name, value)
        self._accessed()

    def __delattr__(self, name):
        delattr(paddle_functional, name)
        self._accessed()


@pytest.mark.parametrize("number", range(4))
def test_threads(before, monkeypatch, number):
    module = Interrupted(number)
    monkeypatch.setattr(_patch, "paddle_functional", module)
    with paddle_gated_ops.patch_paddle():
        assert current() is F.fused_swiglu_weighted_bwd
    module.thread.join()
    assert current() is F.fused_swiglu_weighted_bwd
    module.patches[0].restore()
    assert current() is before


def test_call_through_paddles_name(place):
    inputs = testing.swiglu_weighted_inputs((3, 5), 24)
    with paddle_gated_ops.patch_paddle():
        outputs = paddle.incubate.nn.functional.fused_swiglu_weighted_bwd(
            *tensors_of(inputs, place).values(), name="any"
        )
    outputs = dict(zip(("do1", "probs_grad", "o2_s"), map(array_of, outputs)))
    assert_same_bits(outputs, run_swiglu(inputs, place))
    assert tuple(inputs) == SWIGLU_INPUTS


SCRIPT = """
import paddle
import paddle.incubate.nn.functional as F

batch_size, seq_len = 4, 8
intermediate_size = 64
o1 = paddle.randn([batch_size, seq_len, intermediate_size * 2]).astype('bfloat16')
do2_s = paddle.randn([batch_size, seq_len, intermediate_size]).astype('bfloat16')
expert_probs = paddle.rand([batch_size, seq_len, 1], dtype='float32')

do1, probs_grad, o2_s = F.fused_swiglu_weighted_bwd(o1, do2_s, expert_probs)
print(list(do1.shape), list(probs_grad.shape), list(o2_s.shape))
"""


def test_a_script_for_paddle_runs_unchanged():
    printed = run_python(f"import paddle_gated_ops; paddle_gated_ops.patch_paddle(); exec({SCRIPT!r})")
    assert printed == "[4, 8, 128] [4, 8, 1] [4, 8, 64]"
