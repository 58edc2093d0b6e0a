"""The record's figures of a federation whose test images lie at its sites, and its result."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast import __version__
from holdfast.config import Config, to_tree
from holdfast.deploy.clients import Evaluation
from holdfast.deploy.live import LiveFederation
from holdfast.machine import machine_of
from holdfast.models.stored import write_model
from holdfast.results.record import Result, curves_of, read_record, write_result
from holdfast.seeding import generator
from holdfast.server import metrics
from holdfast.server.metrics import Counts


def figures_of(
    line: Mapping[str, Any], evaluations: Mapping[str, Evaluation], seed: int
) -> tuple[dict[str, Any], Counts]:
    """The figures of a round's model from what its sites have counted on their held-out images, all images alike."""
    sizes = line["growths"]
    names = {name: i for i, name in enumerate(line["classes"])}
    counts = np.zeros((len(names), len(names) + 1), dtype=np.int64)
    for one in evaluations.values():
        for row, name in zip(one.counts, one.classes, strict=True):
            counts[names[name], : len(row)] += row
    right, of = (sum(getattr(one, key) for one in evaluations.values()) for key in ("right", "of"))
    per_site = {site: one.right / one.of for site, one in sorted(evaluations.items()) if one.of}
    figures: dict[str, Any] = {"classes_seen": len(names), "accuracy": right / of if of else 0.0}
    figures |= {"macro_f1": 0.0, "macro_recall": 0.0, "batchwise128": {"macro_f1": 0.0, "macro_recall": 0.0}}
    figures["task_accuracy"] = [0.0] * len(sizes)
    figures["evaluation"] = {"by": "sites, on images they hold out", "images": of, "sites": per_site}
    if counts.sum():
        held = counts.sum(axis=1) > 0
        seen = counts[held][:, [*np.flatnonzero(held), -1]].copy()
        seen[:, -1] += counts[held].sum(axis=1) - seen.sum(axis=1)  # guesses of classes that no site holds out
        figures["macro_f1"], figures["macro_recall"] = metrics.macro_f1(seen), metrics.macro_recall(seen)
        figures["batchwise128"] = metrics.batchwise(seen, generator(seed, "batchwise", line["round"] - 1))
        ends = np.cumsum(sizes)
        for task, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            part = counts[end - size : end]
            hits = np.trace(part[:, end - size : end])
            figures["task_accuracy"][task] = float(hits / part.sum()) if part.sum() else 0.0
    return figures, counts


def write_summary(
    folder: Path, config: Config, federation: LiveFederation, counts: Counts, names: Mapping[int, str]
) -> None:
    """result.json and model.safetensors, of the rounds so far."""
    lines = read_record(folder)
    registry = federation.server.registry
    if not registry.growths or not lines[-1]["growths"]:
        return
    last = list({line["task"]: line for line in lines if line["growths"]}.values())
    matrix = [line["task_accuracy"][: i + 1] for i, line in enumerate(last)]
    sites = {site: number for number, site in names.items()}
    per_site = lines[-1]["evaluation"]["sites"]
    worst = min(per_site, key=lambda site: per_site[site]) if per_site else None
    same = {key: value for key, value in to_tree(config).items() if key not in ("seed", "run")}
    result = Result(
        version=__version__,
        experiment=hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:8],
        method=config.method.title(config.model.name),
        dataset=config.data.name,
        seed=config.seed,
        machine=machine_of(torch.device("cpu")),
        task_sizes=list(registry.growths),
        accuracy_after_task=[line["accuracy"] for line in last],
        accuracy_matrix=matrix,
        average_accuracy=float(np.mean([line["accuracy"] for line in last])),
        last_accuracy=lines[-1]["accuracy"],
        forgetting=metrics.forgetting(matrix),
        macro_f1=lines[-1]["macro_f1"],
        macro_recall=lines[-1]["macro_recall"],
        worst_client={"client": sites[worst] if worst else -1, "accuracy": per_site[worst] if worst else 0.0},
        group_accuracy={},
        bytes=_totals(lines),
        seconds={key: round(sum(line["seconds"].get(key, 0.0) for line in lines), 3) for key in lines[-1]["seconds"]},
        confusion=counts.tolist(),
        classes=list(registry.names),
        curves=curves_of(last),
    )
    write_result(folder, result)
    enrolment = federation.enrolment
    facts = {
        "classes": registry.names,
        "growths": registry.growths,
        "method": to_tree(config)["method"],
        **asdict(enrolment.spec),
        "mean": enrolment.transform.mean,
        "std": enrolment.transform.std,
    }
    write_model(folder / "model.safetensors", federation.server.weights, facts)


def _totals(lines: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for line in lines:
        for channel, ways in line["bytes"].items():
            for way, count in ways.items():
                total.setdefault(channel, {}).setdefault(way, 0)
                total[channel][way] += count
    return total
