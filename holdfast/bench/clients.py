"""The cost of a round as the number of registered clients grows while ten are selected.

As a module with a number of clients as its argument, it runs a federation of that size and prints what it measured as
JSON. Each size has a separate process, so that its memory can be measured."""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

from holdfast.bench import Ratio, Report
from holdfast.checkpoint import Checkpoints
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.experiment import build_federation, choose_engine, plan_of
from holdfast.machine import one_thread
from holdfast.results.record import Record
from holdfast.simulation.rounds import run_rounds

SIZES = [30, 300, 3_000, 30_000, 100_000]
IMAGES = 20  # per class
BOUND = 1.3
IDLE = 10_000  # bytes that an additional idle client may cost


def measure(tell: Callable[[str], None]) -> Report:
    found = []
    for size in SIZES:
        tell(f"{size} clients")
        command = [sys.executable, "-m", "holdfast.bench.clients", str(size)]
        found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    rows = [
        [
            f"{one['clients']:,}",
            f"{one['round_seconds']:.2f}",
            f"{one['slowest_seconds']:.2f}",
            f"{one['setup_seconds']:.1f}",
            f"{one['memory_bytes'] / 1e6:.0f}",
        ]
        for one in found
    ]
    first, last = found[0], found[-1]
    idle = (last["memory_bytes"] - first["memory_bytes"]) / (last["clients"] - first["clients"])
    ratios = [
        Ratio(
            f"{SIZES[-1]:,} clients / {SIZES[0]}", last["round_seconds"] / first["round_seconds"], BOUND, at_most=True
        ),
        Ratio("bytes of an idle client", idle, IDLE, at_most=True),
    ]
    head = ["clients", "seconds per round", "slowest round", "setting up", "peak memory, MB"]
    return Report(ratios, head, rows, {"sizes": found})


def run_one(clients: int) -> dict[str, Any]:
    """Runs two tasks of LGA with record and checkpoint; every client holds the same images."""
    config = load_config(
        {
            "data": {"name": "glyphs", "classes": 10, "train_per_class": IMAGES, "test_per_class": 20, "size": 32},
            "plan": {
                "tasks": 2,
                "clients": clients,
                "join_per_task": 0,
                "selected": 10,
                "class_share": 1.0,
                "move_on": 1.0,
                "rounds": 4,
                "memory": 20,
            },
            "train": {"epochs": 1, "batch": 128},
            "method": {"name": "lga", "iterations": 20},
        }
    )
    start = perf_counter()
    data = load_data(config.data)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        federation = build_federation(config, data, plan_of(config, data))
        checkpoints, seconds = Checkpoints(Path(folder), {}), []
        with Record(Path(folder)) as record, choose_engine(config, data, federation) as engine:
            setup = perf_counter() - start
            start = perf_counter()
            for done in run_rounds(federation, engine):
                record.write(done.line)
                checkpoints.save(done.line["round"], federation, done.counts)
                seconds.append(perf_counter() - start)
                start = perf_counter()
    return {
        "clients": clients,
        "setup_seconds": setup,
        "round_seconds": mean(seconds[1:]),  # during the first, the workers are still starting
        "slowest_seconds": max(seconds[1:]),
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


if __name__ == "__main__":
    print(json.dumps(run_one(int(sys.argv[1]))))
