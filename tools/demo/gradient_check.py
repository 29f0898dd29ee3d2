"""Compares what the two backward ops return during training with float64."""

from contextlib import contextmanager

# The library's compiled functions, which its layers call: only there the ops' real inputs are to be seen.
from paddle_gated_ops._library import C
from paddle_gated_ops.testing import check_rmsnorm_silu_gate_bwd, check_swiglu_weighted_bwd


def _arrays(**tensors):
    return {name: tensor.numpy() for name, tensor in tensors.items()}  # BF16 comes as its bits, uint16


class GradientCheck:
    """The worst errors so far.

    Attributes:
        calls (int): how many calls of the ops were checked.
        worst (dict): output's name to its largest error, in units of the promised bound: 1.0 or less is right.
    """

    def __init__(self):
        self.calls = 0
        self.worst = {}

    def largest(self):
        """The largest error of all outputs; infinite where nothing was checked."""
        return max(self.worst.values(), default=float("inf"))

    @contextmanager
    def active(self):
        """Inside, every call of the backward ops that a layer makes is checked, on its real inputs."""
        swiglu, norm = C.fused_swiglu_weighted_bwd_out, C.cake_rmsnorm_silu_gate_train_backward

        def checked_swiglu(function, o1, do2_s, unzipped_probs, *options):
            # Before the call, which writes do1 over o1 and o2_s over do2_s.
            inputs = _arrays(o1=o1, do2_s=do2_s, unzipped_probs=unzipped_probs)
            do1, probs_grad, o2_s = swiglu(function, o1, do2_s, unzipped_probs, *options)
            self._keep(check_swiglu_weighted_bwd(inputs, _arrays(do1=do1, probs_grad=probs_grad, o2_s=o2_s)))
            return do1, probs_grad, o2_s

        def checked_norm(grad_out, x, z, weight, eps, *options):
            inputs = _arrays(grad_out=grad_out, x=x, z=z, weight=weight)
            grad_x, grad_z, grad_weight = norm(grad_out, x, z, weight, eps, *options)
            outputs = _arrays(grad_x=grad_x, grad_z=grad_z, grad_weight=grad_weight)
            self._keep(check_rmsnorm_silu_gate_bwd(inputs, outputs, eps))
            return grad_x, grad_z, grad_weight

        C.fused_swiglu_weighted_bwd_out, C.cake_rmsnorm_silu_gate_train_backward = checked_swiglu, checked_norm
        try:
            yield
        finally:
            C.fused_swiglu_weighted_bwd_out, C.cake_rmsnorm_silu_gate_train_backward = swiglu, norm

    def _keep(self, errors):
        self.calls += 1
        for name, error in errors.items():
            self.worst[name] = max(error, self.worst.get(name, 0.0))
