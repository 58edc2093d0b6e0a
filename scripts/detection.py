"""How well the detectors work: `python scripts/detection.py CONFIG [SECTION.KEY=VALUE ...]` prints one line of JSON.

LGA runs with the oracle, and without the proxy, which detection does not need. `auto` and `fixed` observe the same
entropies without being acted on, so both are judged on the same run."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.client.detector import Auto, Detector, Fixed, Observed, Told
from holdfast.config import load_config, parse_setting
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.machine import one_thread
from holdfast.progress import progress_bar
from holdfast.protocol.messages import Snapshot
from holdfast.simulation.plan import Plan
from holdfast.simulation.rounds import play


class Judged:
    """The oracle decides; other detectors observe the same and are scored against it."""

    def __init__(self, plan: Plan, others: dict[str, Detector]) -> None:
        self.told, self.others = Told(plan), others
        self.counts = {name: {"found": 0, "missed": 0, "false_alarms": 0} for name in others}
        self.client_rounds = 0

    def notice(self, number: int, observe: Callable[[], Observed]) -> np.ndarray:
        seen = observe()
        self.client_rounds += int((seen.which >= 0).sum())
        told = self.told.notice(number, observe)
        truth = set(told.tolist())
        for name, other in self.others.items():
            alarmed = set(other.notice(number, lambda: seen).tolist())
            self.counts[name]["found"] += len(alarmed & truth)
            self.counts[name]["missed"] += len(truth - alarmed)
            self.counts[name]["false_alarms"] += len(alarmed - truth)
        return told

    def snapshot(self) -> dict[str, Snapshot]:
        return {}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        pass


def measured(file: Path, settings: list[tuple[str, Any]]) -> dict[str, Any]:
    config = load_config(file, [("method.name", "lga"), ("method.psr", False), *settings])
    data = load_data(config.data)
    plan = plan_of(config, data)
    federation = build_federation(config, data, plan)
    judged = federation.detector = Judged(plan, {"auto": Auto(), "fixed": Fixed()})
    with one_thread(), progress_bar() as bar:
        task = bar.add_task(file.stem, total=sum(map(len, plan.selected)))
        for _ in play(federation, Serial(), tick=lambda: bar.advance(task)):
            pass
    sizes = [len(classes) for classes in plan.tasks]
    return {
        "protocol": file.stem,
        "settings": dict(settings),
        "classes_a_task": sizes[0],
        "transitions": judged.counts["auto"]["found"] + judged.counts["auto"]["missed"],
        "client_rounds": judged.client_rounds,
        **judged.counts,
    }


if __name__ == "__main__":
    print(json.dumps(measured(Path(sys.argv[1]), [parse_setting(text) for text in sys.argv[2:]])))
