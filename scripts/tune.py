"""Finds a rival's settings at mini scale, by one rule for all: `python scripts/tune.py METHOD [--report]`.

There are six trials on glyphs-mini (seven for PODNet, which has a published variant), with other characters than those
reported:

1. Three learning rates, a factor of two apart.
2. A fourth rate: beyond the best one if that is at the edge, otherwise between it and its better neighbour. Where a
   variant changes the network (DyTox), this trial comes after the variants, with the best of them.
3. The method's variants one by one, for example other ways to classify, each with the best settings so far.
4. The method's main weight divided by three, again with the best settings; then, if a trial is left, divided by nine if
   that was better, otherwise times three. A method without a weight spends the remaining trials on learning rates.

Two more trials on tiny-mini, with other classes than those reported, compare the chosen rate with half of it. With
--report, the three reported seeds of both protocols follow. Runs go to runs/; what is complete there, or
in an archive of benchmarks/ (see scripts/archive_runs.py), is not repeated."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.methods import METHODS
from holdfast.results import archive

ROOT = Path(__file__).parents[1]
TUNING = {"glyphs-mini": "data.seed=1", "tiny-mini": "data.first_class=50"}
TRIALS = 6
SEEDS = (2021, 2022, 2023)


@dataclass(frozen=True)
class Rival:
    rate: float
    weight: tuple[str, float] | None = None
    variants: list[dict[str, object]] = field(default_factory=list)
    networks: bool = False  # does a variant change the network?
    first: dict[str, object] = field(default_factory=dict)  # settings of the first trials that are not the defaults


RIVALS = {
    "icarl": Rival(1.0, variants=[{"inference": "nme"}], first={"inference": "head"}),
    "bic": Rival(0.1, variants=[{"held_out": 0.2}, {"keep_all": True}]),
    "podnet": Rival(
        0.1,
        weight=("spatial", 3.0),
        variants=[{"inference": "nme"}, {"inference": "nme", "spatial": 5.0, "scale": 9.0}],
    ),
    "dde": Rival(0.1, weight=("beta", 0.25)),
    "geodl": Rival(0.1, weight=("strength", 10.0), variants=[{"inference": "nme"}]),
    "ssil": Rival(0.1, variants=[{"ratio": 2}]),
    "dytox": Rival(0.002, variants=[{"encoder": "network"}, {"tune_rate": 0.001}], networks=True),
    "afc": Rival(0.1, weight=("strength", 4.0), variants=[{"inference": "nme"}]),
    "glfc": Rival(1.0, variants=[{"gradient": "softmax"}]),
    "fedprox": Rival(0.1, weight=("mu", 0.01)),
}

Setting = dict[str, object]  # the learning rate, and what differs from the method's defaults


def defaults(method: str) -> Setting:
    """What its trials change, as it is in the first of them."""
    rival = RIVALS[method]
    changed = [*(key for variant in rival.variants for key in variant), *([rival.weight[0]] if rival.weight else [])]
    values = {key: getattr(METHODS[method](), key) for key in changed} | rival.first
    return {key: value for key, value in values.items() if value is not None}


def run(method: str, protocol: str, setting: Setting, out: Path, seed: int = 2021, *more: str) -> float:
    """The average accuracy in per cent; 0 where training diverged. What an archive of the repository has is not run."""
    name = f"{out.parent.name}/{out.name}"
    if name in archived():
        return percent(archived()[name])
    if not (out / "result.json").exists() and not (out / "diverged").exists():
        whole = {**defaults(method), **setting}  # the config has the final settings
        keys = {"train.lr" if key == "lr" else f"method.{key}": value for key, value in whole.items()}
        sets = [*more, "run.engine=serial", *(f"{key}={json.dumps(value)}" for key, value in keys.items())]
        flags = [part for one in sets for part in ("--set", one)]
        command = [sys.executable, "-m", "holdfast", "run", f"configs/{protocol}.toml", "--seed", str(seed)]
        code = subprocess.run([*command, "--method", method, *flags, "--out", str(out)], cwd=ROOT).returncode
        if code:
            out.mkdir(parents=True, exist_ok=True)
            (out / "diverged").write_text(f"exit code {code}\n")
    if (out / "diverged").exists():
        return 0.0
    return percent(json.loads((out / "result.json").read_text()))


def percent(result: dict[str, Any] | None) -> float:
    return round(100 * result["average_accuracy"], 2) if result else 0.0


@cache
def archived() -> dict[str, dict[str, Any] | None]:
    """The results of all runs in the repository's archives by their names; None where training diverged."""
    files = sorted((ROOT / "benchmarks").glob(f"*{archive.SUFFIX}"))
    return {line["name"]: line["result"] for file in files for line in archive.read(file)}


class Search:
    """All trials of one method on one protocol."""

    def __init__(self, method: str, protocol: str) -> None:
        self.method, self.protocol = method, protocol
        self.found: list[tuple[float, Setting]] = []

    def trial(self, **setting: object) -> float:
        name = "-".join([self.method, *(f"{v}" if k == "lr" else f"{k}-{v}" for k, v in setting.items())])
        out = ROOT / "runs" / f"tuning-{self.protocol}" / name
        found = run(self.method, self.protocol, setting, out, 2021, TUNING[self.protocol])
        self.found.append((found, setting))
        print(self.protocol, name, found, flush=True)
        return found

    def best(self) -> Setting:
        return max(self.found, key=lambda pair: pair[0])[1]

    def next_rate(self) -> float:
        rates = {float(str(s["lr"])): found for found, s in self.found if len(s) == 1}
        order = sorted(rates)
        at = order.index(max(rates, key=lambda rate: rates[rate]))
        if at in (0, len(order) - 1):
            return order[at] * (2 if at else 0.5)
        other = max((order[at - 1], order[at + 1]), key=lambda rate: rates[rate])
        return float(f"{(order[at] * other) ** 0.5:.2g}")


def tune(method: str) -> dict[str, Setting]:
    """The setting for each protocol."""
    rival, glyphs, tiny = RIVALS[method], Search(method, "glyphs-mini"), Search(method, "tiny-mini")
    for factor in (1, 0.5, 2):
        glyphs.trial(lr=rival.rate * factor)
    if not rival.networks:
        glyphs.trial(lr=glyphs.next_rate())
    for variant in rival.variants:
        glyphs.trial(**{**glyphs.best(), **variant})
    if rival.weight:
        (key, value), best = rival.weight, glyphs.best()
        least = max(found for found, _ in glyphs.found)
        less = glyphs.trial(**{**best, key: round(value / 3, 4)})
        if len(glyphs.found) < TRIALS:
            glyphs.trial(**{**best, key: round(value / 9, 4) if less > least else 3 * value})
    kept = glyphs.best() if rival.networks else {}
    while len(glyphs.found) < TRIALS:
        glyphs.trial(**{**kept, "lr": glyphs.next_rate()})
    chosen = glyphs.best()
    for factor in (1, 0.5):
        tiny.trial(**{**chosen, "lr": float(str(chosen["lr"])) * factor})
    return {"glyphs-mini": chosen, "tiny-mini": tiny.best()}


def main() -> None:
    method = sys.argv[1]
    settings = tune(method)
    print(method, json.dumps(settings), flush=True)
    if "--report" in sys.argv:
        for protocol, setting in settings.items():
            for seed in SEEDS:
                found = run(method, protocol, setting, ROOT / "runs" / protocol / f"{method}-{seed}", seed)
                print(protocol, seed, found, flush=True)


if __name__ == "__main__":
    main()
