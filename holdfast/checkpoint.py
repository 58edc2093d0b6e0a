"""Saves and restores the whole federation after each round: exact, atomic, hashed and incremental.

A part (the global model, one of the proxy's old models, a segment of client states, ...) is a blob named by its hash.
A manifest lists the parts of a round. The last two rounds are kept, and share no blob, so that no damage to one file
loses both: even and odd rounds have blobs of their own, among which a part that has not changed is not written again. A
checkpoint whose manifest or blobs are damaged is removed, and the one before it is used. A checkpoint that was
made with other settings, another plan or other images is refused."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from holdfast import __version__
from holdfast.errors import HoldfastError
from holdfast.files import unfinished, write_atomic
from holdfast.protocol.codec import MalformedMessage, Snapshot, pack, unpack
from holdfast.protocol.state import ClientState
from holdfast.server.metrics import Counts
from holdfast.simulation.federation import Federation
from holdfast.simulation.population import Population

KEPT = 2  # rounds
FORMAT = 2  # of the manifest
SEGMENTS = 32  # of client states; after this many all states are rewritten as one


class Damaged(Exception):
    """A checkpoint has changed since it was written."""


# the errors that a truncated or altered file causes
BROKEN = (
    *(Damaged, MalformedMessage, FileNotFoundError),
    *(KeyError, IndexError, ValueError, TypeError, AttributeError, RecursionError),
)


class Checkpoints:
    """The checkpoints of one run, in the subfolder `checkpoint` of its folder. `settings` are those that decide the
    run, section by section."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder / "checkpoint"
        self.settings = settings
        self.segments: list[str] = []
        self.record = ""  # the hash of the record's lines up to the round that was restored
        self._plan: str | None = None  # the hash of the plan

    def save(self, done: int, federation: Federation, counts: Counts, record: str = "") -> None:
        """Writes what has changed in this round. `done` is the number of finished rounds, `record` the hash of their
        lines in the record, if there is one."""
        federation.server.require_finite(done - 1)
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise HoldfastError(f"cannot write to {self.folder}: {error.strerror}") from error
        snapshots = _snapshots(federation, counts)
        parts = {name: self._put(pack("part", *snapshot), done) for name, snapshot in snapshots.items()}
        self._put_states(federation.population, done)
        facts = {"version": __version__, "format": FORMAT, "done": done, "record": record, "run": self._run(federation)}
        text = json.dumps({**facts, "parts": parts, "segments": self.segments})
        write_atomic(self._manifest(done), json.dumps({"sha256": _hash(text.encode()), "body": text}).encode())
        self._tidy()

    def restore(self, federation: Federation) -> tuple[int, Counts | None, list[str]]:
        """Restores the newest valid checkpoint; returns the number of finished rounds, the last counts, and a message
        for each checkpoint that cannot be used."""
        complaints = []
        for file in sorted(self.folder.glob("round-*.json"), reverse=True):
            try:
                body = self._read_manifest(file)
                self._check_run(body["run"], federation)
                parts = {name: unpack("part", self._get(sha)) for name, sha in body["parts"].items()}
                states = [state for sha in body["segments"] for state in _split(self._get(sha))]
            except BROKEN as error:
                complaints.append(f"the checkpoint {file} cannot be used ({error}); trying the one before")
                file.unlink()  # or `_tidy` would keep it and delete new checkpoints of earlier rounds
                continue
            except OSError as error:  # the checkpoint itself may be valid
                raise HoldfastError(
                    f"cannot read {error.filename or file}: {error.strerror}; fix that and run again"
                ) from error
            counts = _restore(federation, parts)
            federation.population.states = {state.client: state for state in states}
            federation.population.changed.clear()
            self.segments, self.record = list(body["segments"]), body["record"]
            return body["done"], counts, complaints
        if complaints:
            complaints.append("no checkpoint is left: starting from round 1")
        return 0, None, complaints

    def read(self, *names: str) -> tuple[int, dict[str, Snapshot]] | None:
        """The number of finished rounds in the newest valid checkpoint, and these parts of it; None if there is none.
        Changes nothing, for the run may still be going."""
        for file in sorted(self.folder.glob("round-*.json"), reverse=True):
            try:
                body = self._read_manifest(file)
                return body["done"], {name: unpack("part", self._get(body["parts"][name])) for name in names}
            except (*BROKEN, OSError):  # a file may be gone, for the run goes on
                continue
        return None

    def _run(self, federation: Federation) -> dict[str, Any]:
        """By what a checkpoint is bound to its run."""
        data = federation.data
        if self._plan is None:
            self._plan = _hash(json.dumps(federation.plan.to_json(data.classes, data.clients)).encode())
        return {"settings": self.settings, "plan": self._plan, "data": data.fingerprint}

    def _check_run(self, known: Mapping[str, Any], federation: Federation) -> None:
        now = json.loads(json.dumps(self._run(federation)))
        differing = _differing(known["settings"], now["settings"])
        for key, what in (("data", "other images"), ("plan", "another plan")):
            if known[key] != now[key]:
                differing.append(what)
        if differing:
            raise HoldfastError(
                f"{self.folder} holds a run with {differing[0]}; restore {self.folder.parent / 'config.toml'} and the "
                "data of that run, or run this one into another folder"
            )

    def remove(self) -> None:
        """Deletes all checkpoints; they are not needed once the result is written."""
        for file in self.folder.glob("*"):
            file.unlink()
        if self.folder.exists():
            self.folder.rmdir()

    def _manifest(self, done: int) -> Path:
        return self.folder / f"round-{done:08d}.json"

    def _read_manifest(self, file: Path) -> dict[str, Any]:
        outer = json.loads(file.read_bytes())
        if _hash(outer["body"].encode()) != outer["sha256"]:
            raise Damaged("the manifest does not match its hash")
        body: dict[str, Any] = json.loads(outer["body"])
        if (body["version"], body.get("format")) != (__version__, FORMAT):
            other = "" if body["version"] != __version__ else " before its checkpoints changed"
            raise HoldfastError(
                f"{self.folder.parent} was started by version {body['version']} of Holdfast{other} and this is "
                f"{__version__}; continue it with that version, or run it again into another folder"
            )
        return body

    def _put(self, blob: bytes, done: int) -> str:
        """Writes a blob for the checkpoint of this round; returns its name."""
        name = f"{_hash(blob)}.{done % KEPT}"
        file = self.folder / name
        if not file.exists():
            write_atomic(file, blob)
        return name

    def _get(self, name: str) -> bytes:
        blob = (self.folder / name).read_bytes()
        if _hash(blob) != name.partition(".")[0]:
            (self.folder / name).unlink()  # or `_put` would take the damaged file for the part when it comes again
            raise Damaged(f"{name[:8]} does not match its hash")
        return blob

    def _put_states(self, population: Population, done: int) -> None:
        """Writes the states that have changed, and this round's own copies of the older segments."""
        changed = [population.states[client] for client in sorted(population.changed)]
        try:
            whole = len(self.segments) >= SEGMENTS
            self.segments = [] if whole else [self._own(name, done) for name in self.segments]
        except BROKEN:  # the states in memory are whole
            whole, self.segments = True, []
        if whole:
            changed = [population.states[client] for client in sorted(population.states)]
        if changed:
            self.segments.append(self._put(_join(changed), done))
        population.changed.clear()

    def _own(self, name: str, done: int) -> str:
        """This round's copy of a blob that another round may have written."""
        own = f"{name.partition('.')[0]}.{done % KEPT}"
        return own if (self.folder / own).exists() else self._put(self._get(name), done)

    def _tidy(self) -> None:
        """Deletes all manifests but the last two, and the blobs that these do not list."""
        manifests = sorted(self.folder.glob("round-*.json"))
        for old in manifests[:-KEPT]:
            old.unlink()
        named = set()
        for file in manifests[-KEPT:]:
            try:
                body = self._read_manifest(file)
            except BROKEN:
                continue
            named |= {*body["parts"].values(), *body["segments"]}
        for file in self.folder.iterdir():
            if unfinished(file) or (file.name not in named and not file.name.startswith("round-")):
                file.unlink()


def _differing(known: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> list[str]:
    """The settings that differ, each with both values."""
    found = []
    for key in sorted(known.keys() | now.keys()):
        before, after = known.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differing(before, after, f"{key}.")
        elif before != after:
            found.append(f"{section}{key} = {json.dumps(before)}, not {json.dumps(after)}")
    return found


class Role(Protocol):
    """A part of the federation that keeps state between rounds."""

    def snapshot(self) -> dict[str, Snapshot]: ...

    def restore(self, parts: Mapping[str, Snapshot]) -> None: ...


def _roles(federation: Federation) -> dict[str, Role]:
    roles: dict[str, Role] = {
        "server": federation.server,
        "selector": federation.selector,
        "population": federation.population,
    }
    return roles if federation.faults is None else {**roles, "faults": federation.faults}


def _snapshots(federation: Federation, counts: Counts) -> dict[str, Snapshot]:
    parts: dict[str, Snapshot] = {"loop": ({"counts": torch.from_numpy(np.ascontiguousarray(counts))}, {})}
    for role, owner in _roles(federation).items():
        parts |= {f"{role}/{name}": snapshot for name, snapshot in owner.snapshot().items()}
    return parts


def _restore(federation: Federation, parts: Mapping[str, Snapshot]) -> Counts:
    tensors, _ = parts["loop"]
    for role, owner in _roles(federation).items():
        start = f"{role}/"
        owner.restore({name[len(start) :]: part for name, part in parts.items() if name.startswith(start)})
    counts: Counts = tensors["counts"].numpy()
    return counts


def _hash(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def _join(states: list[ClientState]) -> bytes:
    """Concatenates states, each preceded by its length."""
    blobs = [state.to_bytes() for state in states]
    return b"".join(len(blob).to_bytes(8, "little") + blob for blob in blobs)


def _split(blob: bytes) -> Iterator[ClientState]:
    place = 0
    while place < len(blob):
        length = int.from_bytes(blob[place : place + 8], "little")
        yield ClientState.from_bytes(blob[place + 8 : place + 8 + length])
        place += 8 + length
