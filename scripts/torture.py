"""Everything that is done to a federation to see whether it holds.

    python scripts/torture.py kills [--kills 50] [--seed 0]
    python scripts/torture.py bad-clients [--methods lga,podnet] [--kinds nan,crash]
    python scripts/torture.py drops --protocol tiny-mini --seeds 2021,2022,2023 [--methods replay,lga]
    python scripts/torture.py hostile --protocol glyphs-mini [--methods replay] [--aggregators median] [--attacks scale]
    python scripts/torture.py soak [--rounds 1000]
    python scripts/torture.py table

Each appends lines to benchmarks/reliability.jsonl (`--out` for another file) and does not run again what is there;
`table` writes the tables into docs/reliability.md. The exit code is 1 where something does not hold.

`kills` kills runs at random moments and compares their results with an uninterrupted run. A run kills itself
(`kill -9`) a random few milliseconds after it has entered a chosen place a random number of times: a round, a
checkpoint, the writing of a file, a change of task, the proxy's work. Both engines take turns. The run is then resumed
until it is killed again or complete. No bit of its model, its record or its result may differ (apart from the
seconds)."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reliability

from holdfast import checkpoint
from holdfast.progress import progress_bar
from holdfast.proxy import prototype_server as proxy
from holdfast.simulation import rounds

CONFIG = """
[data]
name = "glyphs"
classes = 6
train_per_class = 12
test_per_class = 6
size = 16

[plan]
tasks = 3
clients = 6
join_per_task = 2
selected = 4
rounds = 3
move_on = 0.7
memory = 12

[train]
epochs = 2
batch = 16

[method]
name = "lga"
iterations = 10
perturb_steps = 10
"""
KILLS_PER_RUN = 5
PLACES: dict[str, tuple[Any, str]] = {
    "round": (rounds, "run_round"),
    "checkpoint": (checkpoint.Checkpoints, "save"),
    "file": (os, "replace"),  # between writing a temporary file and renaming it
    "task change": (rounds, "_grow"),
    "proxy": (proxy.PrototypeServer, "judge"),
}


def die_in(place: str, entry: int, delay: float) -> None:
    """Makes this process kill itself `delay` seconds after the given entry into a place."""
    owner, name = PLACES[place]
    original: Callable[..., Any] = getattr(owner, name)
    entries = 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal entries
        entries += 1
        if entries == entry:
            threading.Thread(target=_die, args=[delay], daemon=True).start()
        return original(*args, **kwargs)

    setattr(owner, name, watched)


def _die(delay: float) -> None:
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


def start(folder: Path, engine: str, kill: tuple[str, int, float] | None) -> int:
    """Starts or resumes the run in `folder`; the exit code is -9 if it was killed."""
    moment = [] if kill is None else ["--die", *map(str, kill)]
    command = [sys.executable, __file__, *moment, "--victim", str(folder), engine]
    return subprocess.run(command, capture_output=True, timeout=600, check=False).returncode


def outcome(folder: Path) -> tuple[bytes, Any, Any]:
    """Everything that must be equal."""
    record = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    for line in record:
        del line["seconds"]
    result = json.loads((folder / "result.json").read_text())
    return (folder / "model.safetensors").read_bytes(), record, {k: v for k, v in result.items() if "seconds" not in k}


def torture(kills: int, seed: int, file: Path) -> int:
    chance, done, wrong, places = random.Random(seed), 0, 0, dict.fromkeys(PLACES, 0)
    with tempfile.TemporaryDirectory() as top, progress_bar() as bar:
        task = bar.add_task("kills", total=kills)
        (Path(top) / "config.toml").write_text(CONFIG)
        assert start(Path(top) / "whole", "serial", None) == 0
        whole = outcome(Path(top) / "whole")
        number = 0
        while done < kills:
            number += 1
            folder, engine = Path(top) / f"run-{number}", ("serial", "pool")[number % 2]
            survived = mine = 0
            while mine < KILLS_PER_RUN and done < kills and survived < 3 and not (folder / "result.json").exists():
                place = list(PLACES)[(done + number) % len(PLACES)]
                entry = chance.randint(1, 30 if place == "file" else 3)
                delay = chance.choice([0, 0.002, 0.02, 0.2]) * chance.random()
                code = start(folder, engine, (place, entry, delay))
                if code == -signal.SIGKILL:
                    mine, done = mine + 1, done + 1
                    places[place] += 1
                    bar.advance(task)
                elif code == 0:
                    survived += 1
                else:
                    print(f"run {number} stopped with exit code {code} when killed in {place}")
                    return 1
            if start(folder, engine, None) != 0 or outcome(folder) != whole:
                wrong += 1
                print(f"run {number} ({engine}, {mine} kills) differs")
    where = ", ".join(f"{count} in a {place}" for place, count in places.items())
    print(f"{done} kills ({where}) of {number} runs: {number - wrong} ended with the same bits, {wrong} did not")
    facts = {"kills": done, "runs": number, "same": number - wrong, "places": places}
    reliability.append(file, {"table": "kills", "name": f"{kills}-{seed}", **facts})
    return int(wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = ("kills", "bad-clients", "drops", "hostile", "soak", "table")
    parser.add_argument("command", choices=commands, nargs="?", default="kills")
    parser.add_argument("--out", type=Path, default=reliability.FILE)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--protocol", default="tiny-mini")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[2021])
    for name in ("methods", "kinds", "aggregators", "attacks"):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=[])
    parser.add_argument("--die", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--victim", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.victim is not None:
        return victim(given.victim, given.die)
    methods = given.methods or ["replay"]
    match given.command:
        case "bad-clients":
            wrong = reliability.bad_clients(given.out, given.methods, given.kinds)
            print(f"{wrong} runs differ from those without the bad client")
            return int(wrong > 0)
        case "drops":
            reliability.drops(given.out, given.protocol, given.seeds, methods)
        case "hostile":
            reliability.hostile(given.out, given.protocol, given.seeds, methods, given.aggregators, given.attacks)
        case "soak":
            return reliability.soak(given.out, given.rounds)
        case "table":
            reliability.write_tables(given.out)
        case _:
            return torture(given.kills, given.seed, given.out)
    return 0


def victim(place: list[str], die: list[str] | None) -> int:
    """The run that kills itself."""
    if die:
        die_in(die[0], int(die[1]), float(die[2]))
    from holdfast.cli import app

    folder, engine = place
    config = str(Path(folder).parent / "config.toml")
    settings = ["--set", f"run.engine={engine}", "--set", "run.workers=2"]
    app(["run", config, *settings, "--out", folder], standalone_mode=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
