"""Gives damaged and invented inputs to every reader of bytes from outside, under limits of memory and time.

`python scripts/fuzz.py [--inputs 1000000] [--seed 0] [--state build/fuzz.json] [--readers message,zip]`. A reader must
take an input or refuse it with a HoldfastError, within 2 GB and 5 seconds. The state file has the numbers of each
reader; started again with it, the script goes on where it stopped. Input N of a reader follows from the seed, the
reader's name and N: `--show message:17` reads it once more and prints the traceback. The exit code is 1 if any reader
failed."""

import argparse
import json
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

MEMORY = 2 << 30  # bytes of address space
SECONDS = 5  # for one input
STUCK = 20  # seconds after which a process that does not hear its alarm is killed
BLOCK = 200  # inputs after which the state is written
# How often each reader is tried, roughly by the time that an input takes it.
SHARES = {"message": 200, "client state": 100, "lists": 120, "image": 120, "pickle": 80, "zip": 70, "config": 60}
SHARES |= {"matlab": 40, "setting": 40, "model": 30, "cache entry": 30, "cifar archive": 20, "client folder": 20}
SHARES |= {"envelope": 60, "federation": 20, "pretrained weights": 20}
SHARES |= {"checkpoint": 20, "checksums": 20, "run folder": 20, "archive": 15, "zip of images": 10}
STOPPED = {"exception": "uncaught exceptions", "hang": f"hangs over {SECONDS} s", "death": "deaths of the process"}


class Hang(BaseException):
    """An input has taken too long."""


def input_of(reader: Any, name: str, seed: int, number: int) -> bytes:
    return reader.input(random.Random(f"{seed}/{name}/{number}"))  # type: ignore[no-any-return]


def tried(reader: Any, blob: bytes) -> tuple[str, str]:
    """What the reader does with an input: accepted, refused, or a failure and its reason."""
    from holdfast.errors import HoldfastError

    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        reader.read(blob)
        return "accepted", ""
    except HoldfastError:
        return "refused", ""
    except Hang:
        return "hang", ""
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if "holdfast/" in frame.filename]
        where = f" in {Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""
        return "exception", f"{type(error).__name__}{where}: {' '.join(str(error).split())}"[:200]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def child(plan: dict[str, tuple[int, int]], seed: int, place: Path) -> None:
    """Tries inputs `start` to `end` of each reader; prints a line of JSON after every block."""
    os.environ["XDG_CACHE_HOME"] = str(place / "user-cache")
    warnings.simplefilter("ignore")
    from fuzz_readers import readers

    signal.signal(signal.SIGALRM, _hang)
    known = readers(place)
    assert set(known) == set(SHARES)
    for reader in known.values():
        for seed_input in reader.seeds:
            reader.read(seed_input)  # a whole input is accepted
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with open(place / "current", "r+b") as file, mmap.mmap(file.fileno(), 8) as current:
        for name, (start, end) in plan.items():
            for first in range(start, end, BLOCK):
                found: dict[str, Any] = {"reader": name, "accepted": 0, "refused": 0, "failed": []}
                block = range(first, min(first + BLOCK, end))
                for number in block:
                    current[:8] = number.to_bytes(8, "little")
                    what, why = tried(known[name], input_of(known[name], name, seed, number))
                    if what in STOPPED:
                        found["failed"].append([number, what, why])
                    else:
                        found[what] += 1
                print(json.dumps({**found, "done": block.stop}), flush=True)


def _hang(*_: object) -> NoReturn:
    raise Hang


def shares(inputs: int, wanted: list[str] | None) -> dict[str, int]:
    """How many inputs each reader gets."""
    parts = {name: part for name, part in SHARES.items() if not wanted or name in wanted}
    return {name: max(1, round(inputs * part / sum(parts.values()))) for name, part in parts.items()}


def fuzz(inputs: int, seed: int, file: Path, wanted: list[str] | None) -> int:
    state: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"seed": seed, "readers": {}}
    state["wanted"] = state.get("wanted", {}) | shares(inputs, wanted)
    for name in state["wanted"]:
        state["readers"].setdefault(name, {"done": 0, "accepted": 0, "refused": 0, "failed": []})
    file.parent.mkdir(parents=True, exist_ok=True)
    while plan := {
        name: (counts["done"], state["wanted"][name])
        for name, counts in state["readers"].items()
        if counts["done"] < state["wanted"][name]
    }:
        _one_child(plan, state, file)
    total = sum(counts["done"] for counts in state["readers"].values())
    failed = [(name, *one) for name, counts in state["readers"].items() for one in counts["failed"]]
    alike: dict[tuple[str, str, str], list[int]] = {}
    for name, number, what, why in failed:
        alike.setdefault((name, what, why.partition(":")[0]), []).append(number)
    for name, counts in state["readers"].items():
        print(f"{name}: {counts['done']:,} inputs, {counts['refused']:,} refused, {counts['accepted']:,} accepted")
    for (name, what, why), numbers in alike.items():
        print(f"{len(numbers)} {what}, the first of --show '{name}:{numbers[0]}': {why}")
    kinds = ", ".join(f"{sum(one[2] == kind for one in failed)} {text}" for kind, text in STOPPED.items())
    print(f"{total:,} inputs over {len(state['readers'])} readers: {kinds}")
    return int(bool(failed))


def _one_child(plan: dict[str, tuple[int, int]], state: dict[str, Any], file: Path) -> None:
    """Runs a process until it is through or dies, and adds what it finds to the state."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as top:
        place = Path(top)
        (place / "current").write_bytes(bytes(8))
        line = [sys.executable, __file__, "--child", json.dumps(plan), "--seed", str(state["seed"]), "--place", top]
        with open(place / "errors", "wb") as errors:  # libraries in C write there
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, bufsize=0, env=environment)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        seen, since, text = b"", time.monotonic(), b""
        names = list(plan)
        while process.poll() is None or text:
            time.sleep(0.05)
            text += process.stdout.read() or b""
            *lines, text = text.split(b"\n")
            for one in map(json.loads, lines):
                counts = state["readers"][one["reader"]]
                counts["done"] = one["done"]
                for what in ("accepted", "refused"):
                    counts[what] += one[what]
                counts["failed"] += one["failed"]
                _write(file, state)
            if lines or (now := (place / "current").read_bytes()) != seen:
                seen, since = (place / "current").read_bytes(), time.monotonic()
            elif time.monotonic() - since > STUCK + 60 * (int.from_bytes(now, "little") == 0):
                process.kill()
        if process.returncode != 0:
            name = next(name for name in names if state["readers"][name]["done"] < plan[name][1])
            number = int.from_bytes((place / "current").read_bytes(), "little")
            counts = state["readers"][name]
            if number < counts["done"]:
                print((place / "errors").read_text(errors="replace")[-5_000:], file=sys.stderr)
                raise SystemExit(f"the process ended with code {process.returncode} before it read anything of {name}")
            counts["failed"].append([number, "death", f"exit code {process.returncode}"])
            counts["refused"] += number - counts["done"]
            counts["done"] = number + 1
            _write(file, state)


def _write(file: Path, state: dict[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(state, indent=1))
    part.replace(file)


def show(name: str, number: int, seed: int) -> None:
    from fuzz_readers import readers

    with tempfile.TemporaryDirectory() as top:
        reader = readers(Path(top))[name]
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        blob = input_of(reader, name, seed, number)
        print(len(blob), "bytes:", blob[:300])
        started = time.perf_counter()
        try:
            reader.read(blob)
        finally:
            print(f"{time.perf_counter() - started:.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=Path("build/fuzz.json"))
    parser.add_argument("--readers", type=lambda text: text.split(","))
    parser.add_argument("--show")
    parser.add_argument("--child", type=json.loads)
    parser.add_argument("--place", type=Path)
    given = parser.parse_args()
    if given.child is not None:
        child(given.child, given.seed, given.place)
        return 0
    if given.show:
        name, _, number = given.show.rpartition(":")
        show(name, int(number), given.seed)
        return 0
    return fuzz(given.inputs, given.seed, given.state, given.readers)


if __name__ == "__main__":
    sys.exit(main())
