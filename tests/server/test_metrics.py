"""Metrics against scikit-learn and numbers by hand."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, recall_score

from holdfast.seeding import generator
from holdfast.server import metrics


def case(seed: int, balanced: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(6), 20) if balanced else rng.integers(0, 6, 120)
    truth = np.concatenate([truth, np.arange(6)])
    guess = np.where(rng.random(len(truth)) < 0.5, truth, rng.integers(0, 5, len(truth)))  # class 5 is rarely guessed
    counts = np.zeros((6, 7), dtype=np.int64)
    np.add.at(counts, (truth, guess), 1)
    return truth, guess, counts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("balanced", [True, False])
def test_scores_equal_scikit_learns(seed: int, balanced: bool) -> None:
    truth, guess, counts = case(seed, balanced)
    assert metrics.accuracy(counts) == pytest.approx(accuracy_score(truth, guess))
    assert metrics.macro_f1(counts) == pytest.approx(f1_score(truth, guess, average="macro", zero_division=0))
    assert metrics.macro_recall(counts) == pytest.approx(recall_score(truth, guess, average="macro"))
    if balanced:
        assert metrics.macro_recall(counts) == pytest.approx(metrics.accuracy(counts))


def test_images_without_a_prediction_count_as_wrong() -> None:
    counts = np.array([[3, 1, 0], [0, 0, 4]])
    assert metrics.accuracy(counts) == 3 / 8
    assert metrics.class_recall(counts).tolist() == [0.75, 0.0]
    assert metrics.macro_f1(counts) == pytest.approx((6 / 7 + 0) / 2)


def test_task_accuracy_and_client_accuracy() -> None:
    counts = np.array([[4, 0, 0, 0], [2, 2, 0, 0], [1, 0, 7, 0]])
    assert metrics.task_accuracy(counts, [2, 1]) == [6 / 8, 7 / 8]
    assert metrics.client_accuracy(counts, [0, 2]) == 11 / 12


def test_forgetting_is_best_before_minus_final_over_old_tasks() -> None:
    matrix = [[0.9], [0.95, 0.8], [0.5, 0.6, 0.7]]
    assert metrics.forgetting(matrix) == pytest.approx(((0.95 - 0.5) + (0.8 - 0.6)) / 2)
    assert metrics.forgetting([[0.9], [0.95, 0.8]]) == pytest.approx(-0.05)  # a task can gain
    assert metrics.forgetting([[0.9]]) is None


def test_batchwise_scores_are_means_over_shuffled_batches_with_absent_classes_scored_zero() -> None:
    """Against scikit-learn, batch by batch; and far below the truth where classes are many."""
    rng = np.random.Generator(np.random.PCG64(3))
    truth = np.repeat(np.arange(60), 20)
    guess = np.where(rng.random(len(truth)) < 0.7, truth, rng.integers(0, 60, len(truth)))
    counts = np.zeros((60, 61), dtype=np.int64)
    np.add.at(counts, (truth, guess), 1)
    found = metrics.batchwise(counts, generator(1, "batchwise"))
    pairs = np.array([61 * t + g for t in range(60) for g in range(61) for _ in range(counts[t, g])])
    order = np.argsort(generator(1, "batchwise").bit_generator.random_raw(len(pairs)), kind="stable")
    batches = [pairs[order][start : start + 128] for start in range(0, len(pairs), 128)]
    for name, score in (("macro_f1", f1_score), ("macro_recall", recall_score)):
        expected = [score(b // 61, b % 61, labels=list(range(60)), average="macro", zero_division=0) for b in batches]
        assert found[name] == pytest.approx(np.mean(expected))
    present = np.mean([len(np.unique(b // 61)) / 60 for b in batches])
    assert found["macro_recall"] == pytest.approx(metrics.macro_recall(counts) * present, rel=0.05)
    alone = np.array([[5, 0, 0], [1, 4, 0]])
    assert metrics.batchwise(alone, generator(1))["macro_recall"] == pytest.approx(metrics.macro_recall(alone))
