"""The picture of both training curves."""

import matplotlib
import numpy as np
from report import ACCURACY_AT_LEAST, LOSS_DEVIATION_AT_MOST, loss_deviations

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.ticker import MaxNLocator, PercentFormatter  # noqa: E402

# Apart for every kind of colour vision and in grey: dark and thin on light and broad, since the curves coincide.
UNFUSED = dict(color="#E69F00", linewidth=6, alpha=0.75, solid_capstyle="round", label="unfused, FP32")
FUSED = dict(color="#004C7F", linewidth=1.5, marker="o", markersize=4.5, label="fused ops, BF16 at their borders")
LIMIT = dict(color="#666666", linewidth=1, linestyle="--")


def save(result, path):
    """Draws loss, its deviation from the unfused model's, and test accuracy over the epochs; saves a PNG."""
    epochs = np.arange(1, len(result.fused.losses) + 1)
    figure = pyplot.figure(figsize=(9, 4.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[3, 1.3])
    loss = figure.add_subplot(grid[0, 0])
    deviation = figure.add_subplot(grid[1, 0], sharex=loss)
    accuracy = figure.add_subplot(grid[:, 1], sharex=loss)

    loss.plot(epochs, result.unfused.losses, **UNFUSED)
    loss.plot(epochs, result.fused.losses, **FUSED)
    loss.set(title="Training loss", ylabel="mean of each epoch")
    loss.tick_params(labelbottom=False)
    loss.legend(frameon=False)

    percent = 100 * LOSS_DEVIATION_AT_MOST
    deviation.plot(epochs, 100 * loss_deviations(result), **FUSED)
    for limit in (-percent, percent):
        deviation.axhline(limit, **LIMIT)
    deviation.set(xlabel="epoch", ylabel="fused to\nunfused", ylim=(-1.6 * percent, 1.6 * percent))
    deviation.set_yticks([-percent, 0, percent])
    deviation.yaxis.set_major_formatter(PercentFormatter(decimals=0))

    accuracy.plot(epochs, 100 * np.array(result.unfused.accuracies), **UNFUSED)
    accuracy.plot(epochs, 100 * np.array(result.fused.accuracies), **FUSED)
    accuracy.axhline(100 * ACCURACY_AT_LEAST, **LIMIT)
    limit_text = dict(xytext=(0, -4), textcoords="offset points", ha="right", va="top", color=LIMIT["color"])
    accuracy.annotate(f"at least {ACCURACY_AT_LEAST:.0%}", (epochs[-1], 100 * ACCURACY_AT_LEAST), **limit_text)
    deviation.annotate(f"at most {LOSS_DEVIATION_AT_MOST:.0%} apart", (epochs[-1], percent), **limit_text)
    accuracy.set(title="Test accuracy", xlabel="epoch")
    accuracy.yaxis.set_major_formatter(PercentFormatter(decimals=0))

    for axes in (loss, deviation, accuracy):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
