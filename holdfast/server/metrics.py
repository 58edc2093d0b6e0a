"""Numbers from confusion counts (K, K + 1): true class by predicted class, the last column for no prediction."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Matrix = list[list[float]]


def accuracy(counts: Counts) -> float:
    return float(np.trace(counts) / counts.sum())


def class_recall(counts: Counts) -> NDArray[np.float64]:
    """The share of each class's images that is recognised (K,)."""
    recall: NDArray[np.float64] = np.diag(counts) / counts.sum(axis=1)
    return recall


def macro_recall(counts: Counts) -> float:
    return float(class_recall(counts).mean())


def macro_f1(counts: Counts) -> float:
    """The mean over classes of 2TP / (2TP + FP + FN); 0 for a class that is neither there nor predicted."""
    hits = np.diag(counts)
    both = counts.sum(axis=1) + counts[:, :-1].sum(axis=0)  # 2TP + FP + FN
    return float(np.divide(2 * hits, both, out=np.zeros(len(hits)), where=both > 0).mean())


def batchwise(counts: Counts, rng: np.random.Generator, size: int = 128) -> dict[str, float]:
    """Macro F1 and recall as the paper's can only have been made: of every batch of the shuffled test set by itself,
    over all seen classes, a class that the batch does not have scored 0; then the mean over batches. With as many
    classes as a batch has images most are absent, so both are far below the truth. Only for beside those tables."""
    classes = len(counts)
    pairs = np.repeat(np.arange(counts.size), counts.reshape(-1))
    pairs = pairs[np.argsort(rng.bit_generator.random_raw(len(pairs)), kind="stable")]
    f1, recall = [], []
    for start in range(0, len(pairs), size):
        truth, guess = np.divmod(pairs[start : start + size], counts.shape[1])
        there = np.bincount(truth, minlength=classes)
        hits = np.bincount(truth[truth == guess], minlength=classes)
        both = there + np.bincount(guess, minlength=classes + 1)[:classes]  # 2TP + FP + FN
        f1.append(float((2 * hits / np.maximum(both, 1)).mean()))
        recall.append(float((hits / np.maximum(there, 1)).mean()))
    return {"macro_f1": float(np.mean(f1)), "macro_recall": float(np.mean(recall))}


def task_accuracy(counts: Counts, sizes: Sequence[int]) -> list[float]:
    """The accuracy on each task's test images, for tasks of these many classes."""
    ends = np.cumsum(sizes)
    rows = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    hits = np.diag(counts)
    return [float(hits[r].sum() / counts[r].sum()) for r in rows]


def forgotten(matrix: Matrix) -> list[float]:
    """Of each old task its best accuracy before the end minus that at the end; row t: after task t + 1."""
    last = len(matrix) - 1
    return [max(matrix[t][k] for t in range(k, last)) - matrix[last][k] for k in range(last)]


def forgetting(matrix: Matrix) -> float | None:
    """What old tasks have lost on average; nothing where there are none."""
    return float(np.mean(forgotten(matrix))) if len(matrix) > 1 else None


def client_accuracy(counts: Counts, held: Sequence[int]) -> float:
    """The accuracy on the test images of the classes that a client has held."""
    return float(np.diag(counts)[held].sum() / counts[held].sum())
