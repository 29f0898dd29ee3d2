"""run_check says that the ops are right where they are, and raises where they are not."""

import pytest

import paddle_gated_ops
from paddle_gated_ops import _run_check

OUTPUTS = {"do1", "probs_grad", "o2_s", "grad_x", "grad_z", "grad_weight"}


def test_right_ops(capsys):
    worst = paddle_gated_ops.run_check()
    assert "cpu" in worst
    for errors in worst.values():
        assert errors.keys() == OUTPUTS
        assert all(0 < error <= 1 for error in errors.values())
    printed = capsys.readouterr().out
    assert paddle_gated_ops.__version__ in printed and "cpu: both ops are right" in printed


@pytest.mark.parametrize("name", ["fused_swiglu_weighted_bwd", "cake_rmsnorm_silu_gate_train_backward"])
def test_wrong_op(monkeypatch, name):
    right = getattr(_run_check.F, name)

    def first_two_results_swapped_where_shapes_allow(*arguments, **options):
        first, second, third = right(*arguments, **options)
        return (second, first, third) if first.shape == second.shape else (first, second * 1.01, third)

    monkeypatch.setattr(_run_check.F, name, first_two_results_swapped_where_shapes_allow)
    with pytest.raises(AssertionError, match=r"grad_x|probs_grad"):
        paddle_gated_ops.run_check()
