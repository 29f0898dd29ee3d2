"""Trains the fused and the unfused model side by side: the same initial weights, the same batches."""

import time
from dataclasses import dataclass, field

import fused
import numpy as np
import paddle
import paddle.nn.functional as F
import unfused
from gradient_check import GradientCheck
from model import MoEClassifier

BATCH_SIZE = 64
LEARNING_RATE = 1e-3  # at the start; a cosine takes it to 0
WEIGHT_DECAY = 0.01
BALANCE = 0.01  # weight of the experts' balance loss
# Keeps the loss from vanishing as the images are learned by heart: a ratio of two losses of nearly nothing would
# compare the noise of a few images.
LABEL_SMOOTHING = 0.1
CHECK_EVERY = 5  # steps


@dataclass
class Curve:
    """One model's training.

    Attributes:
        losses (list): mean training loss of each epoch.
        accuracies (list): share of the test images classified rightly, after each epoch.
        step_seconds (list): wall time of each training step whose gradients were not checked.
    """

    losses: list = field(default_factory=list)
    accuracies: list = field(default_factory=list)
    step_seconds: list = field(default_factory=list)

    def step_ms(self):
        """The median time of a step, in ms."""
        return 1e3 * float(np.median(self.step_seconds))


@dataclass
class Result:
    """Both curves, and the check of the fused model's gradients."""

    fused: Curve
    unfused: Curve
    gradients: GradientCheck


class _Trainee:
    def __init__(self, ops, steps):
        self.model = MoEClassifier(ops)
        self.schedule = paddle.optimizer.lr.CosineAnnealingDecay(LEARNING_RATE, T_max=steps)
        self.optimizer = paddle.optimizer.AdamW(
            self.schedule, parameters=self.model.parameters(), weight_decay=WEIGHT_DECAY
        )
        self.curve = Curve()
        self.epoch_losses = []

    def step(self, images, labels):
        """One training step; returns its wall time in seconds."""
        _synchronize()
        start = time.perf_counter()
        logits, balance = self.model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=LABEL_SMOOTHING) + BALANCE * balance
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        _synchronize()
        seconds = time.perf_counter() - start
        self.schedule.step()
        self.epoch_losses.append(float(loss))
        return seconds

    def end_epoch(self, batch_sizes, images, labels):
        self.curve.losses.append(float(np.average(self.epoch_losses, weights=batch_sizes)))
        self.epoch_losses = []
        with paddle.no_grad():
            logits, _ = self.model(images)
        self.curve.accuracies.append(float((logits.numpy().argmax(axis=-1) == labels).mean()))


def _synchronize():
    if paddle.get_device().startswith("gpu"):
        paddle.device.cuda.synchronize()


def train(data, epochs, seed, progress):
    """Trains both models on Paddle's current device.

    Args:
        data (Digits): images and labels.
        epochs (int): passes over the training images, each in a new order.
        seed (int): of the initial weights and the order of the images.
        progress (tqdm): a bar, updated by 1 a step of both models.

    Returns:
        Result
    """
    count = len(data.train_images)
    starts = range(0, count, BATCH_SIZE)
    batch_sizes = [min(BATCH_SIZE, count - start) for start in starts]
    test_images = paddle.to_tensor(data.test_images)
    shuffle = np.random.default_rng(seed)

    paddle.seed(seed)
    trainees = [_Trainee(ops, epochs * len(starts)) for ops in (fused, unfused)]
    trainees[1].model.set_state_dict(trainees[0].model.state_dict())
    gradients = GradientCheck()

    step = 0
    for _ in range(epochs):
        order = shuffle.permutation(count)
        for start in starts:
            batch = order[start : start + BATCH_SIZE]
            images, labels = paddle.to_tensor(data.train_images[batch]), paddle.to_tensor(data.train_labels[batch])
            # Taking turns at going first, both meet the same load of the machine and the same caches.
            turns = trainees if step % 2 else trainees[::-1]
            if step % CHECK_EVERY:
                for trainee in turns:
                    trainee.curve.step_seconds.append(trainee.step(images, labels))
            else:
                with gradients.active():
                    for trainee in turns:
                        trainee.step(images, labels)
            step += 1
            progress.update()
        for trainee in trainees:
            trainee.end_epoch(batch_sizes, test_images, data.test_labels)
        progress.set_postfix_str(
            f"loss {trainees[0].curve.losses[-1]:.3f}, test accuracy {trainees[0].curve.accuracies[-1]:.1%}",
            refresh=False,
        )
    return Result(trainees[0].curve, trainees[1].curve, gradients)
