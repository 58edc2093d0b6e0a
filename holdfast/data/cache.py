"""A disk cache for arrays that are expensive to compute: checked on every read, and rebuilt when damaged.

An entry is built in its own folder under a lock. The next process continues what a killed one has left, and two
processes that need the same entry wait for each other."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.errors import HoldfastError
from holdfast.files import parse_json, sha256_of, sync_folder, write_json
from holdfast.locks import lock_file
from holdfast.terminal import Terminal

Key = Mapping[str, str | int | float]
Arrays = dict[str, np.ndarray]
Facts = dict[str, Any]

LAYOUT = 2  # version of the entry format; changing it rebuilds every entry
LARGE = 2**29  # bytes; of a larger file only the length is checked here; `holdfast data check` checks its content


@dataclass(frozen=True)
class Entry:
    """What is stored under a key: memory-mapped arrays, and facts about them."""

    place: Path
    arrays: Arrays
    facts: Facts


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/holdfast`, or `~/.cache/holdfast`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast"


def cached(folder: Path, key: Key, make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `key` names, memory-mapped from below `folder`; `make()` is called only if they are missing."""

    def fill(place: Path) -> Facts:
        try:
            content = make()
            with clear_errors(folder):
                for name, array in content.items():
                    np.save(place / f"{name}.npy", array, allow_pickle=False)
        except BaseException:  # half an entry is useless
            shutil.rmtree(place, ignore_errors=True)
            raise
        return {}

    return entry_of(folder, key, fill).arrays


def entry_of(folder: Path, key: Key, fill: Callable[[Path], Facts]) -> Entry:
    """The entry that `key` names. If it is missing, `fill(place)` writes its .npy files into `place`, which may already
    hold files from an earlier, killed process, and returns further facts about them."""
    place = folder / _entry_name(key)
    if (entry := _read(place, key)) is not None:
        return entry
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        gate = place.with_name(f".{place.name}.lock")
        lock = open(gate, "w")  # noqa: SIM115
    with lock:
        _wait(lock.fileno(), key)
        if (entry := _read(place, key)) is not None:  # another process has made it
            return entry
        growing = place.with_name(f".{place.name}.growing")
        with clear_errors(folder):
            if os.path.lexists(place):
                _say(f"The cached data in {place} is damaged or incomplete; removing and rebuilding it.")
                _remove(place)
            growing.mkdir(exist_ok=True)
        facts = fill(growing)
        with clear_errors(folder):
            _finish(growing, key, facts)
            os.rename(growing, place)
            sync_folder(folder)
            gate.unlink(missing_ok=True)  # processes that still wait for it will find the entry
    if (entry := _read(place, key)) is None:
        raise HoldfastError(f"the cached data in {place} does not read back as written; check the disk and run again")
    return entry


def is_whole(place: Path) -> bool:
    """Does every file of an entry, however large, have the content that was written?"""
    meta = json.loads((place / "meta.json").read_bytes())
    return all(sha256_of(place / name) == facts["sha256"] for name, facts in meta["files"].items())


def _entry_name(key: Key) -> str:
    canonical = json.dumps({**key, "layout": LAYOUT}, sort_keys=True, separators=(",", ":"))
    return f"{key['name']}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"


def _read(place: Path, key: Key) -> Entry | None:
    """The entry if it is complete and unaltered, otherwise None."""
    try:
        meta = parse_json((place / "meta.json").read_bytes())
        files = sorted(place.glob("*.npy"))
        if meta["key"] != dict(key) or [file.name for file in files] != sorted(meta["files"]):
            return None
        for file in files:
            size, known = file.stat().st_size, meta["files"][file.name]
            if size != known["bytes"] or (size <= LARGE and sha256_of(file) != known["sha256"]):
                return None
        # "c" (copy on write): torch requires writable arrays, and the file must not change
        arrays = {file.stem: np.load(file, mmap_mode="c", allow_pickle=False) for file in files}
        return Entry(place, arrays, meta["facts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _finish(growing: Path, key: Key, facts: Facts) -> None:
    """Flushes all files to disk and writes their lengths and checksums."""
    files: dict[str, Facts] = {}
    for file in sorted(growing.glob("*.npy")):
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
        files[file.name] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    write_json(growing / "meta.json", {"key": dict(key), "files": files, "facts": facts})


def _wait(lock: int, key: Key) -> None:
    """Waits until no other process builds this entry; the lock of a killed process is released."""
    try:
        lock_file(lock, wait=False)
    except BlockingIOError:
        _say(f"Another process is preparing {key['name']}; waiting for it.")
        lock_file(lock)


def _remove(place: Path) -> None:
    """Renames before deleting, so that no other process sees half an entry."""
    grave = place.with_name(f".{place.name}.{uuid.uuid4().hex}.tmp")
    with suppress(FileNotFoundError):
        os.rename(place, grave)
    shutil.rmtree(grave, ignore_errors=True)


def _say(text: str) -> None:
    Terminal(stderr=True).print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def clear_errors(folder: Path) -> Iterator[None]:
    """Turns a failed write into one sentence that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise HoldfastError(
            f"the cache folder {folder} cannot be written ({reason}); "
            "set XDG_CACHE_HOME to a writable place with enough free space"
        ) from error
