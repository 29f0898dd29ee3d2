"""Compares what the two ops return during training with float64."""

from contextlib import contextmanager

import fused
from paddle_gated_ops.testing import check_rmsnorm_silu_gate_bwd, check_swiglu_weighted_bwd


def _arrays(names, tensors):
    return {name: tensor.numpy() for name, tensor in zip(names, tensors)}  # BF16 comes as its bits, uint16


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
        """Inside, every call of the ops that the PyLayers of ``fused`` make is checked, on its real inputs."""
        swiglu, norm = fused.fused_swiglu_weighted_bwd, fused.cake_rmsnorm_silu_gate_train_backward

        def checked_swiglu(*inputs):
            outputs = swiglu(*inputs)
            self._keep(
                check_swiglu_weighted_bwd(
                    _arrays(("o1", "do2_s", "unzipped_probs"), inputs),
                    _arrays(("do1", "probs_grad", "o2_s"), outputs),
                )
            )
            return outputs

        def checked_norm(*inputs, **preallocated):
            outputs = norm(*inputs, **preallocated)
            *tensors, eps = inputs
            self._keep(
                check_rmsnorm_silu_gate_bwd(
                    _arrays(("grad_out", "x", "z", "weight"), tensors),
                    _arrays(("grad_x", "grad_z", "grad_weight"), outputs),
                    eps,
                )
            )
            return outputs

        # In the module's place, so that the PyLayers themselves stay as a user would write them.
        fused.fused_swiglu_weighted_bwd, fused.cake_rmsnorm_silu_gate_train_backward = checked_swiglu, checked_norm
        try:
            yield
        finally:
            fused.fused_swiglu_weighted_bwd, fused.cake_rmsnorm_silu_gate_train_backward = swiglu, norm

    def _keep(self, errors):
        self.calls += 1
        for name, error in errors.items():
            self.worst[name] = max(error, self.worst.get(name, 0.0))
