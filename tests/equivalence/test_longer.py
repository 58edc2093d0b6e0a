"""What comes later changes nothing of what was before: a longer run begins with the shorter one, to the bit."""

from typing import Any

import pytest

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.simulation.rounds import run_rounds

METHODS: list[dict[str, Any]] = [
    {"name": "fedavg", "replay": True},
    {"name": "podnet", "inference": "nme", "tune_epochs": 2},
    # The encoding network has as many outputs as there will be classes, unless that is said.
    {"name": "lga", "iterations": 3, "perturb_steps": 2, "capacity": 6},
]


def lines(settings: dict[str, Any], method: dict[str, Any], tasks: int) -> list[dict[str, Any]]:
    """The record of a run with this many tasks of two classes, but for its seconds."""
    sizes = {"data": {**settings["data"], "classes": 2 * tasks}, "plan": {**settings["plan"], "tasks": tasks}}
    config = load_config({**settings, **sizes, "method": method})
    data = load_data(config.data)
    rounds = run_rounds(build_federation(config, data, plan_of(config, data)), Serial())
    return [{key: value for key, value in one.line.items() if key != "seconds"} for one in rounds]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_longer_run_begins_like_a_shorter_one(small: dict[str, Any], method: dict[str, Any]) -> None:
    shorter, longer = lines(small, method, 2), lines(small, method, 3)
    assert len(shorter) < len(longer)
    assert shorter == longer[: len(shorter)]
