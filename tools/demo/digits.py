"""scikit-learn's bundled handwritten digits: 1797 grey images of 8 x 8 pixels, 10 classes."""

from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class Digits(NamedTuple):
    """Images are float32 [n, 64], labels int64 [n]."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(seed):
    """Three quarters to train, one to test, each with every class in proportion; the split follows the seed.

    The brightness is normalized to mean 0 and variance 1 over the training images.
    """
    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels.astype(np.int64), test_size=0.25, stratify=labels, random_state=seed
    )
    mean, std = train_images.mean(), train_images.std()
    train_images, test_images = (((part - mean) / std).astype(np.float32) for part in (train_images, test_images))
    return Digits(train_images, train_labels, test_images, test_labels)
