"""Follows the runs below a folder while they are written. It reads only, and only what has been added since."""

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from threading import Lock
from time import time
from typing import Any

RECENT = 10  # rounds from which the time left is estimated
REFUSALS = 5  # the latest refused updates that are shown
POINTS = 400  # of a curve; longer ones are thinned out
LARGEST = 64 * 2**20  # bytes of a file that is read at once
QUIET = 600.0  # seconds without a new round after which a run counts as stopped, where locks cannot be seen


@dataclass
class Tail:
    """The complete lines of a file that grows. A last line without its end is left for the next look; a file that was
    replaced or cut is read anew."""

    file: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    _seen: tuple[int, int] = (0, 0)  # inode, and bytes of complete lines

    def read(self) -> list[dict[str, Any]]:
        try:
            with open(self.file, "rb") as stream:
                facts = os.fstat(stream.fileno())
                if facts.st_ino != self._seen[0] or facts.st_size < self._seen[1]:
                    self.lines, self._seen = [], (facts.st_ino, 0)
                stream.seek(self._seen[1])
                added = stream.read(LARGEST)
        except OSError:
            return self.lines
        whole = added[: added.rfind(b"\n") + 1]
        for raw in whole.splitlines():
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and isinstance(line.get("round"), int):
                self.lines.append(line)
        self._seen = (self._seen[0], self._seen[1] + len(whole))
        return self.lines


class Watched:
    """All runs below a folder; `state` gives what the page shows of them as plain values."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time) -> None:
        self.folder, self._clock = folder, clock
        self._tails: dict[Path, Tail] = {}
        self._plans: dict[Path, tuple[float, dict[str, Any]]] = {}
        self._configs: dict[Path, tuple[float, dict[str, Any]]] = {}
        self._lock = Lock()

    def state(self) -> dict[str, Any]:
        """Running runs first, then the others, each by the time of their last round."""
        with self._lock:  # the server answers several browsers at once
            held = locked_inodes()
            folders = sorted({file.parent for file in self.folder.rglob("config.toml")})
            runs = [run for folder in folders if (run := self._understood(folder, held))]
        order = {"running": 0, "stopped": 1, "finished": 2}
        runs.sort(key=lambda run: (order[run["state"]], -run["changed"]))
        return {"folder": str(self.folder), "runs": runs}

    def _understood(self, folder: Path, held: set[int] | None) -> dict[str, Any] | None:
        """One run; None for a folder whose files are not those of a run, which must not hide the others."""
        try:
            return self._run(folder, held)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):
            return None

    def _run(self, folder: Path, held: set[int] | None) -> dict[str, Any] | None:
        config = self._cached(self._configs, folder / "config.toml", lambda raw: tomllib.loads(raw.decode("utf-8-sig")))
        plan = self._cached(self._plans, folder / "plan.json", json.loads)
        tail = self._tails.setdefault(folder, Tail(folder / "record.jsonl"))
        lines = tail.read()
        if not isinstance(config.get("method"), dict):
            return None
        changed = _changed(folder / "record.jsonl") or _changed(folder / "config.toml")
        finished = (folder / "result.json").exists()
        running = not finished and is_running(folder, held, self._clock() - changed)
        selected = [list(chosen) for chosen in plan.get("selected", []) if isinstance(chosen, list)]
        done = lines[-1]["round"] if lines else 0
        names = plan.get("clients") or []
        training = selected[done] if running and done < len(selected) else []
        refused = [{"round": line["round"], **one} for line in lines for one in _refusals(line)]
        data = config.get("data")
        return {
            "name": str(folder.relative_to(self.folder)) if folder != self.folder else folder.name,
            "method": str(config["method"].get("name", "")),
            "data": str(data.get("name", "")) if isinstance(data, dict) else "",
            "seed": config.get("seed", 0),
            "state": "finished" if finished else "running" if running else "stopped",
            "round": done,
            "rounds": len(selected) or None,
            "task": lines[-1].get("task") if lines else None,
            "tasks": len(plan.get("tasks", [])) or None,
            "starts": [start - 1 for start in plan.get("starts", []) if isinstance(start, int)],
            "accuracy": _finite(lines[-1].get("accuracy")) if lines else None,
            "curve": thinned([(line["round"], _finite(line.get("accuracy"))) for line in lines]),
            "loss": thinned([(line["round"], _total_loss(line)) for line in lines]),
            "changed": round(changed, 1),
            "ends": expected_end(lines, selected, changed) if running else None,
            "training": [_name(client, names) for client in training],
            "refused": len(refused),
            "missing": sum(len(line.get("missing") or []) for line in lines),
            "refusals": [
                {
                    "client": _name(one.get("client"), names),
                    **{key: str(one.get(key, "")) for key in ("round", "kind", "reason")},
                }
                for one in refused[-REFUSALS:]
            ],
            "bytes": _bytes(lines),
        }

    def _cached(
        self, cache: dict[Path, tuple[float, dict[str, Any]]], file: Path, parse: Callable[[bytes], Any]
    ) -> dict[str, Any]:
        """The content of a file, parsed again only when it changes; empty while it cannot be read."""
        changed = _changed(file)
        known = cache.get(file)
        if known and known[0] == changed:
            return known[1]
        try:
            found = parse(file.read_bytes()) if file.stat().st_size <= LARGEST else {}
        except (OSError, ValueError, RecursionError):
            return known[1] if known else {}
        cache[file] = (changed, found if isinstance(found, dict) else {})
        return cache[file][1]


def locked_inodes() -> set[int] | None:
    """The inodes of all files that a process has locked, from the system's own list; None where there is no such list.
    Trying the lock instead could get in the way of a run that is just starting."""
    try:
        rows = Path("/proc/locks").read_text().splitlines()
        return {int(row.split()[5 if "->" not in row else 6].rpartition(":")[2]) for row in rows}
    except (OSError, ValueError, IndexError):
        return None


def is_running(folder: Path, held: set[int] | None, quiet: float) -> bool:
    """Does a process write this run? It holds the lock of the folder; a killed one leaves the file without the lock."""
    try:
        inode = (folder / ".lock").stat().st_ino
    except OSError:
        return False
    return inode in held if held is not None else quiet < QUIET


def expected_end(lines: list[dict[str, Any]], selected: list[list[int]], changed: float) -> float | None:
    """When the run will end if clients take as long as in recent rounds; in seconds since 1970."""
    recent = [(sum(line.get("seconds", {}).values()), len(line.get("selected", [])) or 1) for line in lines[-RECENT:]]
    if not recent or len(selected) <= len(lines):
        return None
    each = median(seconds / clients for seconds, clients in recent)
    return round(changed + float(each) * sum(len(chosen) for chosen in selected[len(lines) :]), 1)


def thinned(points: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """At most about POINTS of them, always with the last."""
    step = -(-len(points) // POINTS) or 1
    return [*points[::step], *(points[-1:] if (len(points) - 1) % step else [])] if points else []


def _refusals(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = line.get("refused")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _name(client: object, names: list[Any]) -> str:
    """Clients are numbers in a simulation; those of folders also have names."""
    if not isinstance(client, int):
        return str(client)
    return str(names[client]) if client < len(names) else f"client {client}"


def _finite(value: object) -> float | None:
    return round(float(value), 5) if isinstance(value, int | float) and isfinite(value) else None


def _total_loss(line: Mapping[str, Any]) -> float | None:
    terms = [_finite(value) for value in (line.get("losses") or {}).values()]
    return round(sum(value or 0.0 for value in terms), 5) if terms else None


def _bytes(lines: list[dict[str, Any]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for line in lines:
        for channel, ways in (line.get("bytes") or {}).items():
            total[channel] = total.get(channel, 0) + sum(ways.values())
    return total


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
