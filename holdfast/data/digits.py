"""Handwritten digits that come with scikit-learn: 1797 real images, no download."""

import numpy as np
from PIL import Image

CLASSES = tuple("0123456789")
MEAN = (0.31, 0.31, 0.31)
STD = (0.38, 0.38, 0.38)

BRIGHTEST = 16  # the largest value of a pixel in scikit-learn's images


def load(size: int) -> dict[str, np.ndarray]:
    """The first four fifths of each digit are for training, the rest for testing; images (N, 3, size, size) uint8."""
    from sklearn.datasets import load_digits  # here, because the import takes seconds that only this data set needs

    digits = load_digits()
    by_class = [np.flatnonzero(digits.target == c) for c in range(len(CLASSES))]
    train = np.concatenate([rows[: len(rows) * 4 // 5] for rows in by_class])
    test = np.concatenate([rows[len(rows) * 4 // 5 :] for rows in by_class])
    images = np.stack([_resized(image, size) for image in digits.images])  # (1797, 3, size, size)
    labels = digits.target.astype(np.int64)
    return {
        "train_images": images[train],
        "train_labels": labels[train],
        "test_images": images[test],
        "test_labels": labels[test],
    }


def _resized(image: np.ndarray, size: int) -> np.ndarray:
    """(8, 8) of 0 to 16 -> (3, size, size) uint8."""
    grey = Image.fromarray((image * 255 / BRIGHTEST).round().astype(np.uint8))
    pixels = np.asarray(grey.resize((size, size), Image.Resampling.BILINEAR))
    return np.stack([pixels] * 3)
