"""A federation of real processes on this machine, for tests: kits, image folders, and processes that are ended by their
own ids."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from holdfast.data.settings import DataSettings
from holdfast.data.sources import load_data

SIZE = 16


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def glyphs(classes: int, images: int, size: int = SIZE) -> dict[str, list[Any]]:
    """Class name -> its images, as arrays (S, S, 3)."""
    data = load_data(DataSettings("glyphs", classes=classes, train_per_class=images, test_per_class=1, size=size))
    found = {}
    for c in range(classes):
        rows = data.train.by_class[c]
        found[f"class-{c}"] = [image.permute(1, 2, 0).numpy() for image in data.train.images[rows]]
    return found


def write_images(folder: Path, images: Mapping[str, Sequence[Any]]) -> None:
    for name, arrays in images.items():
        place = folder / name
        temporary = folder / f".{name}"
        temporary.mkdir(parents=True, exist_ok=True)
        for i, array in enumerate(arrays):
            Image.fromarray(array).save(temporary / f"{i:04d}.png")
        temporary.rename(place)


def federation_toml(
    method: str,
    sites: Sequence[str],
    ports: Sequence[int],
    total: int,
    extra: str = "",
    rounds: int = 3,
    size: int = SIZE,
) -> str:
    names = ", ".join(f'"{site}"' for site in sites)
    return f"""
name = "test"
sites = [{names}]
classes = 10
shared_seeds = true

[server]
address = "127.0.0.1:{ports[0]}"
listen = "127.0.0.1:{ports[0]}"

[proxy]
address = "127.0.0.1:{ports[1]}"
listen = "127.0.0.1:{ports[1]}"

[rounds]
total = {total}
deadline = 120.0
minimum = {len(sites)}
start_with = {len(sites)}

[experiment]
seed = 7

[experiment.data]
size = {size}

[experiment.model]
name = "convnet"

[experiment.plan]
rounds = {rounds}
memory = 20

[experiment.train]
epochs = 1
batch = 16

[experiment.method]
{method}
{extra}
"""


class Processes:
    """Starts the parties of a federation and ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.end(name)

    def holdfast(self, *arguments: str, timeout: float = 60) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "holdfast", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=self._environment())

    @staticmethod
    def _environment() -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}

    def start(self, name: str, *arguments: str) -> None:
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115
        command = [sys.executable, "-m", "holdfast", *arguments]
        self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment())
        log.close()

    def end(self, name: str, how: int = signal.SIGTERM) -> None:
        process = self.running.pop(name)
        if process.poll() is None:
            process.send_signal(how)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.folder.glob("*.log")))

    def wait(self, until: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not until():
            dead = [name for name, process in self.running.items() if process.poll() not in (None, 0)]
            if dead or time.monotonic() > end:
                raise AssertionError(f"{what}: {'ended: ' + str(dead) if dead else 'too slow'}\n{self.logs()}")
            time.sleep(0.1)


def lines(record: Path) -> list[dict[str, Any]]:
    file = record / "record.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def status(kit: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((kit / "state" / "status.json").read_bytes()))
    except (OSError, ValueError):
        return {}
