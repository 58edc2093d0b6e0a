"""The result of a run, from its plan, the lines of its record and the counts of its last round."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.results.record import Result, curves_of
from holdfast.server import metrics
from holdfast.simulation.plan import Plan
from holdfast.simulation.scoring import left_behind

Line = Mapping[str, Any]


def summarise(
    identity: Mapping[str, Any],
    plan: Plan,
    classes: Sequence[str],
    lines: Sequence[Line],
    counts: metrics.Counts,
    clients: Sequence[str] = (),
) -> Result:
    """`identity` holds the fields of the result that identify the run: version, experiment, method, dataset, seed.
    `clients` are the clients' names, if they have any."""
    ends = [line for round_index, line in enumerate(lines) if plan.ends_task(round_index)]
    matrix = [line["task_accuracy"] for line in ends]
    after = [line["accuracy"] for line in ends]
    worst, accuracy, groups = left_behind(plan, counts)
    return Result(
        **identity,
        task_sizes=[len(task) for task in plan.tasks],
        accuracy_after_task=after,
        accuracy_matrix=matrix,
        average_accuracy=float(np.mean(after)),
        last_accuracy=after[-1],
        forgetting=metrics.forgetting(matrix),
        macro_f1=ends[-1]["macro_f1"],
        macro_recall=ends[-1]["macro_recall"],
        worst_client={
            "client": worst,
            "name": clients[worst] if clients else f"client {worst}",
            "accuracy": accuracy,
        },
        group_accuracy=groups,
        bytes=_total_bytes(lines),
        seconds=_total_seconds(lines),
        confusion=counts.tolist(),
        classes=[classes[c] for c in plan.seen(plan.rounds - 1)],
        detection=detection(lines),
        curves=curves_of(lines),
    )


def detection(lines: Sequence[Line]) -> dict[str, float | None]:
    """Totals over all clients' detectors: transitions found at once, late or never, and false alarms in
    client-rounds."""
    events = [line["detector"] for line in lines]
    hits, misses = (sum(len(event[key]) for event in events) for key in ("hits", "misses"))
    delays = [delay for event in events for _, delay in event["late"]]
    return {
        "transitions": hits + misses,
        "hits": hits,
        "late": len(delays),
        "never": misses - len(delays),
        "mean_delay": float(np.mean([0] * hits + delays)) if hits + len(delays) else None,
        "false_alarms": sum(len(event["false_alarms"]) for event in events),
        "client_rounds": sum(event["asked"] for event in events),
    }


def _total_bytes(lines: Sequence[Line]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for line in lines:
        for channel, ways in line["bytes"].items():
            for way, count in ways.items():
                total.setdefault(channel, {}).setdefault(way, 0)
                total[channel][way] += count
    return total


def _total_seconds(lines: Sequence[Line]) -> dict[str, float]:
    phases = {phase: None for line in lines for phase in line["seconds"]}
    return {phase: round(sum(line["seconds"].get(phase, 0.0) for line in lines), 3) for phase in phases}
