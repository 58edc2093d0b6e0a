"""What only a simulation knows: how well detectors did against the plan, and who is left behind."""

from typing import Any

import numpy as np

from holdfast.seeding import generator
from holdfast.server import metrics
from holdfast.server.metrics import Counts
from holdfast.simulation.plan import Plan


def score_detection(
    plan: Plan, round_index: int, observed: int, alarmed: np.ndarray, before: np.ndarray
) -> dict[str, Any]:
    """Compares a round's alarms with the truth. `before` is how many of its arrivals each client had noticed.

    A false alarm is one of a client to whom nothing has come that it has not noticed; a miss that is found later is
    late by so many rounds."""
    timeline = plan.timeline
    arriving = timeline.arriving(round_index)
    arrived = timeline.client[arriving[timeline.brings[arriving]]]
    upto, before = timeline.current(round_index)[alarmed] + 1, before[alarmed]
    waited = timeline.waiting(alarmed, before, upto)
    noticed, upto, before = alarmed[waited], upto[waited], before[waited]
    late = [
        [client, round_index - arrival.round_index]
        for client, start, end in _longer(noticed, before, upto, arrived)
        for arrival in plan.arrivals[client][start:end]
        if arrival.brought and arrival.round_index < round_index
    ]
    return {
        "asked": observed,
        "hits": np.intersect1d(noticed, arrived).tolist(),
        "misses": np.setdiff1d(arrived, noticed).tolist(),
        "late": late,
        "false_alarms": alarmed[~waited].tolist(),
    }


def _longer(noticed: np.ndarray, start: np.ndarray, end: np.ndarray, arrived: np.ndarray) -> list[list[int]]:
    """Client, start and end of those who have noticed more than what came in this round."""
    more = (end - start > 1) | ~np.isin(noticed, arrived)
    rows: list[list[int]] = np.stack([noticed[more], start[more], end[more]], axis=1).tolist()
    return rows


def score_model(plan: Plan, round_index: int, counts: Counts, seed: int) -> dict[str, Any]:
    """The record's figures of a round, from its confusion counts."""
    sizes = [len(task) for task in plan.tasks[: plan.task_of_round(round_index) + 1]]
    return {
        "accuracy": metrics.accuracy(counts),
        "macro_f1": metrics.macro_f1(counts),
        "macro_recall": metrics.macro_recall(counts),
        "batchwise128": metrics.batchwise(counts, generator(seed, "batchwise", round_index)),
        "task_accuracy": metrics.task_accuracy(counts, sizes),
    }


def left_behind(plan: Plan, counts: Counts) -> tuple[int, float, dict[str, float | None]]:
    """Who is left behind: the worst client, its accuracy, and the mean of each group of the last task, on the classes
    that they have held."""
    place = {c: i for i, c in enumerate(plan.seen(plan.rounds - 1))}
    held = {client: plan.held(client, plan.rounds - 1) for client in range(len(plan.arrivals))}
    scores = {
        client: metrics.client_accuracy(counts, [place[c] for c in classes])
        for client, classes in held.items()
        if classes
    }
    worst = min(scores, key=lambda client: scores[client])
    groups: dict[str, list[float]] = {"Zo": [], "Zn": [], "Za": []}
    for client, score in scores.items():
        groups[plan.groups[-1][client]].append(score)
    means = {group: float(np.mean(values)) if values else None for group, values in groups.items()}
    return worst, scores[worst], means
