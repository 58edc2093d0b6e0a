"""Saves and restores the whole federation after each round: exact, atomic, hashed and incremental.

A part (the global model, one of the proxy's old models, a segment of client states, ...) is a blob named by its hash; a
part that has not changed is not written again. A manifest lists the parts of a round. The last two rounds are kept. A
checkpoint whose manifest or blobs are damaged is removed, and the one before it is used."""

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

KEPT = 2  # rounds
SEGMENTS = 32  # of client states; after this many all states are rewritten as one


class Damaged(Exception):
    """A checkpoint has changed since it was written."""


# the errors that a truncated or altered file causes
BROKEN = (Damaged, MalformedMessage, KeyError, ValueError, TypeError, AttributeError, FileNotFoundError)


class Checkpoints:
    """The checkpoints of one run, in the subfolder `checkpoint` of its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoint"
        self.segments: list[str] = []
        self.record = ""  # the hash of the record's lines up to the round that was restored

    def save(self, done: int, federation: Federation, counts: Counts, record: str = "") -> None:
        """Writes what has changed in this round. `done` is the number of finished rounds, `record` the hash of their
        lines in the record, if there is one."""
        federation.server.require_finite(done - 1)
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise HoldfastError(f"cannot write to {self.folder}: {error.strerror}") from error
        parts = {name: self._put(pack("part", *snapshot)) for name, snapshot in _snapshots(federation, counts).items()}
        population = federation.population
        changed = [population.states[client] for client in sorted(population.changed)]
        if len(self.segments) >= SEGMENTS:
            self.segments, changed = [], [population.states[client] for client in sorted(population.states)]
        if changed:
            self.segments.append(self._put(_join(changed)))
        population.changed.clear()
        facts = {"version": __version__, "done": done, "record": record}
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
        if body["version"] != __version__:
            raise HoldfastError(
                f"{self.folder.parent} was started by version {body['version']} of Holdfast and this is "
                f"{__version__}; continue it with that version, or run it again into another folder"
            )
        return body

    def _put(self, blob: bytes) -> str:
        name = _hash(blob)
        file = self.folder / name
        if not file.exists():
            write_atomic(file, blob)
        return name

    def _get(self, name: str) -> bytes:
        blob = (self.folder / name).read_bytes()
        if _hash(blob) != name:
            (self.folder / name).unlink()  # or `_put` would take the damaged file for the part when it comes again
            raise Damaged(f"{name[:8]} does not match its hash")
        return blob

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
