"""Runs that take from each other what their clients have done already find what they would find alone."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.simulation.rounds import run_rounds

Shared = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "run_shared.py"))["Shared"]
LGA = {"name": "lga", "iterations": 3, "perturb_steps": 2}
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "fewer tasks": (2, {}),
    "another teacher": (3, {"patience": 0}),
    "other prototypes": (3, {"npb": False}),
}


def lines(settings: dict[str, Any], tasks: int, method: dict[str, Any], folder: Path | None) -> list[dict[str, Any]]:
    """The record of a run, but for its seconds; with a folder, its clients' work is kept there and taken from there."""
    sizes = {"data": {**settings["data"], "classes": 2 * tasks}, "plan": {**settings["plan"], "tasks": tasks}}
    config = load_config({**settings, **sizes, "method": {**LGA, **method}})
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    engine = Serial() if folder is None else Shared(folder, config, federation)
    return [{k: v for k, v in one.line.items() if k != "seconds"} for one in run_rounds(federation, engine)]


@pytest.mark.parametrize("other", OTHERS)
def test_shared_work_changes_nothing_but_the_time(small: dict[str, Any], tmp_path: Path, other: str) -> None:
    tasks, method = OTHERS[other]
    first = lines(small, 3, {}, tmp_path)
    assert first == lines(small, 3, {}, None)
    done = len(list(tmp_path.iterdir()))
    assert done == sum(len(line["trained"]) for line in first)
    together = lines(small, tasks, method, tmp_path)
    assert together == lines(small, tasks, method, None)
    assert len(list(tmp_path.iterdir())) - done < sum(len(line["trained"]) for line in together)  # some were there
