"""The numbers that the paper prints in its tables, and the settings it states for them, from published.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Line:
    """A line of a table: one number per task, their average, and by how much LGA is printed to be better."""

    values: tuple[float, ...]
    average: float
    improvement: float | None  # None: the line is LGA's own


def _line(row: Mapping[str, Any]) -> Line:
    return Line(tuple(row["after_task"]), row["average"], row.get("improvement"))


def _lines(rows: Mapping[str, Any]) -> dict[str, Line]:
    return {method: _line(row) for method, row in rows.items()}


_PRINTED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))

COMMON: dict[str, Any] = _PRINTED["settings"]  # as in a config: plan, model, train, for
DATA_SETS: dict[str, dict[str, Any]] = _PRINTED["data_sets"]
SEEDS: tuple[int, ...] = tuple(_PRINTED["seeds"])
RIVALS: tuple[str, ...] = tuple(_PRINTED["rivals"])
ABLATIONS: tuple[str, ...] = tuple(_PRINTED["ablations"])
COST: dict[str, float] = _PRINTED["cost"]

ACCURACY: dict[tuple[str, int], dict[str, Line]] = {  # by data set and number of tasks
    (dataset, int(tasks)): _lines(rows)
    for tasks, tables in _PRINTED["accuracy"].items()
    for dataset, rows in tables.items()
}
HETEROGENEITY: dict[tuple[str, int], dict[str, Line]] = {  # by measure and share of a task's classes in per cent
    (measure, int(share)): _lines(rows)
    for measure, tables in _PRINTED["heterogeneity"].items()
    for share, rows in tables.items()
}
MEMORY: dict[tuple[str, int, int], Line] = {  # by measure, exemplars per client and number of tasks
    (measure, int(exemplars), int(tasks)): _line(row)
    for measure, tables in _PRINTED["memory"].items()
    for exemplars, rows in tables.items()
    for tasks, row in rows.items()
}
ORDERS: dict[tuple[int, str], dict[int, float]] = {  # by class order and method, then by number of tasks
    (int(order), method): {int(tasks): average for tasks, average in averages.items()}
    for order, methods in _PRINTED["orders"].items()
    for method, averages in methods.items()
}
