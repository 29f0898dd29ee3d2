"""What came of the training: the conditions it has to meet, and the report."""

from typing import NamedTuple

import numpy as np

ACCURACY_AT_LEAST = 0.95
GRADIENT_ERROR_AT_MOST = 1.0  # units of the promised bound
LOSS_DEVIATION_AT_MOST = 0.02  # relative, in every epoch


class Condition(NamedTuple):
    """A line of the report: what it is about, what was found, what was wanted, and whether that is met."""

    name: str
    found: str
    wanted: str
    met: bool


def loss_deviations(result):
    """fused / unfused - 1 of the mean training loss of each epoch, an array."""
    return np.divide(result.fused.losses, result.unfused.losses) - 1


def conditions(result):
    """What has to hold of a training; NaN meets no condition."""
    accuracy = result.fused.accuracies[-1]
    error = result.gradients.largest()
    deviation = float(np.abs(loss_deviations(result)).max())
    return [
        Condition(
            "test accuracy",
            f"{accuracy:.1%} (unfused model {result.unfused.accuracies[-1]:.1%})",
            f"at least {ACCURACY_AT_LEAST:.0%}",
            accuracy >= ACCURACY_AT_LEAST,
        ),
        Condition(
            "largest gradient error",
            f"{error:.3f} of the promised bound",
            f"at most {GRADIENT_ERROR_AT_MOST:.0f}",
            error <= GRADIENT_ERROR_AT_MOST,
        ),
        Condition(
            "loss beside the unfused model's",
            f"{deviation:.2%} apart in the worst epoch",
            f"at most {LOSS_DEVIATION_AT_MOST:.0%}",
            deviation <= LOSS_DEVIATION_AT_MOST,
        ),
    ]


def text(result, threads):
    """The report, some lines.

    Args:
        result (training.Result): what came of it.
        threads (int or None): of the ops; None on a GPU.
    """
    lines = [
        f"{'ok' if condition.met else 'FAILED':6}  {condition.name + ':':32} {condition.found} ({condition.wanted})"
        for condition in conditions(result)
    ]
    errors = ", ".join(f"{name} {error:.3f}" for name, error in result.gradients.worst.items())
    fused_ms, unfused_ms = result.fused.step_ms(), result.unfused.step_ms()
    place = "GPU" if threads is None else f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    lines += [
        f"        {'time of a step:':32} {fused_ms:.2f} ms, unfused FP32 {unfused_ms:.2f} ms "
        f"(medians of {len(result.fused.step_seconds)} steps each; {place})",
        "",
        f"Gradients of {result.gradients.calls} calls against float64, in units of the bound: {errors}",
    ]
    return "\n".join(lines)
