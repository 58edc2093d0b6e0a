"""How well the detectors do: `python scripts/detection.py CONFIG [SECTION.KEY=VALUE ...]` prints one line of JSON.

LGA runs with the oracle (and without the proxy, which detection does not need); `auto` and `fixed` look on and see the
same entropies, once in every present client and once in the selected clients alone (`plan.observe`), so that all are
judged on the same run."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from holdfast.client.detector import CorrelationDetector, Detector, ThresholdDetector
from holdfast.config import load_config, parse_setting
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.machine import one_thread
from holdfast.progress import progress_bar
from holdfast.protocol.messages import Broadcast
from holdfast.results.summary import detection
from holdfast.server.clients import Opened
from holdfast.simulation.engine import ImageGroup
from holdfast.simulation.federation import Federation, SimulatedClients
from holdfast.simulation.population import Population
from holdfast.simulation.rounds import run_rounds
from holdfast.simulation.scoring import score_detection

DETECTORS: dict[str, Detector] = {"auto": CorrelationDetector(), "fixed": ThresholdDetector()}
OBSERVE = ("present", "selected")


class Judged(SimulatedClients):
    """Clients that are told by the oracle, with detectors looking on."""

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation, Serial(), federation.work())
        keys = [(name, observe) for name in DETECTORS for observe in OBSERVE]
        data, memory, method = federation.data, federation.enrolment.memory, federation.method
        self.onlookers = {
            key: Population(federation.plan, data.train, data.classes, memory, method.exemplars) for key in keys
        }
        self.lines: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in keys}

    def open_round(self, broadcast: Broadcast, selected: Sequence[int], observers: np.ndarray) -> Opened:
        opened = super().open_round(broadcast, selected, observers)
        plan, round_index = self.federation.plan, broadcast.round_index
        infer, known = self._entropies(broadcast), {}

        def entropies(groups: Sequence[ImageGroup]) -> list[Tensor]:
            """The entropies of these images, each group found once for all onlookers."""
            keys = [(group.name, group.ids.numpy().tobytes()) for group in groups]
            missing = [(key, group) for key, group in zip(keys, groups, strict=True) if key not in known]
            known.update(zip((key for key, _ in missing), infer([group for _, group in missing]), strict=True))
            return [known[key] for key in keys]

        for (name, observe), population in self.onlookers.items():
            population.begin_round(round_index)
            looking = np.asarray(plan.present(round_index) if observe == "present" else selected)
            before = population.noticed.copy()
            observed, alarmed = population.observe(DETECTORS[name], looking, entropies)
            score = score_detection(plan, round_index, observed, alarmed, before)
            self.lines[name, observe].append({"detector": score})
            population.notice(alarmed)
        return opened


def measured(file: Path, settings: list[tuple[str, Any]]) -> dict[str, Any]:
    fixed = [("method.name", "lga"), ("method.psr", False), ("method.detector", "oracle")]
    config = load_config(file, [*fixed, *settings])
    data = load_data(config.data)
    plan = plan_of(config, data)
    federation = build_federation(config, data, plan)
    judged = Judged(federation)
    with one_thread(), progress_bar() as bar:
        task = bar.add_task(file.stem, total=sum(map(len, plan.selected)))
        for _ in run_rounds(federation, Serial(), lambda: bar.advance(task), clients=judged):
            pass
    found = {name: {o: detection(judged.lines[name, o]) for o in OBSERVE} for name in DETECTORS}
    return {
        "protocol": file.stem,
        "settings": dict(settings),
        "classes_per_task": len(plan.tasks[0]),
        **found,
    }


if __name__ == "__main__":
    print(json.dumps(measured(Path(sys.argv[1]), [parse_setting(text) for text in sys.argv[2:]])))
