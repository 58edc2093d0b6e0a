"""How much of a round is arithmetic that every engine must do, and what a pool gains over one process."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from holdfast.bench import Ratio, Report
from holdfast.checkpoint import Checkpoints
from holdfast.config import load_config
from holdfast.data.decoding import cores
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, plan_of, pool_of
from holdfast.machine import one_thread
from holdfast.models.passes import CHUNK
from holdfast.results.record import Record
from holdfast.simulation.engine import Engine
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import Round, run_rounds

CLIENTS = 10
BOUNDS = {"resnet18": 0.85, "convnet": 0.75}
EPOCHS = {"resnet18": 1, "convnet": 8}
GAIN = 1.7  # of a pool of two over one process
SAVING = 0.02  # of a round
CHECKING = 0.02  # of a round
COUNTED = {"resnet18": 1, "convnet": 3}  # rounds that are measured
TASKS = [1, 4]  # classes
IMAGES, EXEMPLARS, TEST = 25, 28, 103  # per class, per client, per class


def measure(networks: list[str], tell: Callable[[str], None]) -> Report:
    """Runs two tasks of LGA with ten equal clients and measures the rounds in the middle of the second."""
    ratios, rows, facts = [], [], {}
    with one_thread():
        for network in networks:
            found = _measure(network, tell)
            facts[network] = found
            ratios += [
                Ratio(f"{network}: bare loop / round", found["ratio"], BOUNDS[network]),
                Ratio(f"{network}: serial / pool", found["gain"], GAIN),
            ]
            if network == "resnet18":
                ratios += [
                    Ratio("resnet18: checkpoint and record / round", found["saving"], SAVING, at_most=True),
                    Ratio("resnet18: checks of replies and model / round", found["checking"], CHECKING, at_most=True),
                ]
            rows += [[network, phase, f"{seconds:.3f}"] for phase, seconds in found["phases"].items()]
    return Report(ratios, ["network", "part of a round", "seconds"], rows, {"networks": facts, "cores": cores()})


def _measure(network: str, tell: Callable[[str], None]) -> dict[str, Any]:
    rounds_per_task = COUNTED[network] + 2
    config = load_config(
        {
            "data": {
                "name": "glyphs",
                "classes": sum(TASKS),
                "train_per_class": IMAGES,
                "test_per_class": TEST,
                "size": 32,
            },
            "plan": {
                "tasks": TASKS,
                "clients": CLIENTS,
                "join_per_task": 0,
                "selected": CLIENTS,
                "class_share": 1.0,
                "move_on": 1.0,
                "rounds": rounds_per_task,
                "memory": EXEMPLARS,
            },
            "model": {"name": network},
            "train": {"epochs": EPOCHS[network], "batch": 128},
            "method": {"name": "lga", "perturb_steps": 1},
        }
    )
    data = load_data(config.data)
    plan = plan_of(config, data)
    federation, alone = (build_federation(config, data, plan) for _ in range(2))
    batches = [TASKS[1] * IMAGES + min(IMAGES, EXEMPLARS)] * CLIENTS * EPOCHS[network]  # one per client and epoch
    asked = [*TASKS[1] * _chunks(IMAGES), *_chunks(sum(TASKS) * TEST)]  # class by class, and the test set
    bare, rounds, saving, phases = [], [], [], []
    gain = rebuilding = 0.0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = stack.enter_context(pool_of(federation, data, cores()))
        loop = stack.enter_context(_bare_loop(network, TASKS, batches, asked))
        record, checkpoints = stack.enter_context(Record(folder)), Checkpoints(folder, {})
        last = 2 * rounds_per_task - 1
        for number in range(last):
            tell(f"{network}: round {number + 1} of {last}")
            counted = number > rounds_per_task  # in the second task, after its first round and before its last
            if counted:
                bare.append(loop())
            done, seconds = _timed(federation, pool, number)
            start = perf_counter()
            record.write(done.line)
            checkpoints.save(number + 1, federation, done.counts)
            saved = perf_counter() - start
            if counted:
                rounds.append(seconds + saved)
                saving.append(saved / rounds[-1])
                phases.append({**done.line["seconds"], "checkpoint": saved})
            if number == rounds_per_task:
                rebuilding = done.line["seconds"]["proxy"]
                checkpoints.restore(alone)
            if number == rounds_per_task + 1:
                tell(f"{network}: the same round in one process")
                gain = _timed(alone, Serial(), number)[1] / seconds
                _compare(federation, alone)
    return {
        "ratio": statistics.median(bare) / statistics.median(rounds),
        "gain": gain,
        "saving": statistics.median(saving),
        "checking": statistics.median(phase["check"] / whole for phase, whole in zip(phases, rounds, strict=True)),
        "bare_seconds": bare,
        "round_seconds": rounds,
        "reconstruction_seconds": rebuilding,
        "phases": {name: statistics.median(phase[name] for phase in phases) for name in phases[0]},
    }


def _timed(federation: Federation, engine: Engine, number: int) -> tuple[Round, float]:
    start = perf_counter()
    done = next(run_rounds(federation, engine, start=number))
    return done, perf_counter() - start


def _chunks(images: int) -> list[int]:
    return [min(CHUNK, images - start) for start in range(0, images, CHUNK)]


def _compare(one: Federation, other: Federation) -> None:
    for name, tensor in one.server.weights.items():
        if not torch.equal(tensor, other.server.weights[name]):
            raise HoldfastError(f"the pool and one process disagree about {name}; please report this")


@contextmanager
def _bare_loop(
    backbone: str, classes: list[int], batches: list[int], asked: list[int]
) -> Iterator[Callable[[], float]]:
    """A function that runs the bare loop in one process per core and returns the seconds of the slowest."""
    count = cores()
    processes = []
    for i in range(count):
        part = {
            "backbone": backbone,
            "size": 32,
            "classes": classes,
            "batches": batches[i::count],
            "asked": asked[i::count],
        }
        command = [sys.executable, "-m", "holdfast.bench.bare", json.dumps(part)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1))

    def heard() -> list[str]:
        return [process.stdout.readline() for process in processes if process.stdout]

    def run() -> float:
        for process in processes:
            print(file=process.stdin)
        return max(map(float, heard()))

    try:
        heard()
        yield run
    finally:
        for process in processes:
            process.kill()
            process.communicate()
