"""Arrays that are dear to make, kept on disk: made once, checked at every reading, made anew when damaged."""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from holdfast.errors import HoldfastError
from holdfast.files import sync_folder, write_json

Key = Mapping[str, str | int | float]
Arrays = dict[str, np.ndarray]

ABANDONED = 24 * 3600  # seconds; no writer takes a day, so an older temporary folder is a killed run's


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/holdfast`, or `~/.cache/holdfast`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast"


def cached(folder: Path, key: Key, make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `key` names, memory-mapped from below `folder`; `make()` is asked only if they are not there."""
    entry = folder / _entry_name(key)
    found = os.path.lexists(entry)  # asked first: what another process puts there from now on is not damaged
    arrays = _read(entry, key) if found else None
    if arrays is not None:
        return arrays
    with _clear_errors(folder):
        if found:
            _say(f"The cached data in {entry} is damaged or incomplete; it is removed and made anew.")
            _remove(entry)
        temporary = _temporary(entry)
        temporary.mkdir(parents=True)  # before the long work, so that a read-only folder is known at once
    try:
        content = make()
        with _clear_errors(folder):
            _write(temporary, key, content)
            _move(temporary, entry)
        _sweep(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    del content  # the caller gets the mapped arrays, so that memory does not hold both
    arrays = _read(entry, key)
    if arrays is None:
        raise HoldfastError(f"the cached data in {entry} does not read back as written; check the disk and run again")
    return arrays


def _entry_name(key: Key) -> str:
    canonical = json.dumps(dict(key), sort_keys=True, separators=(",", ":"))
    return f"{key['name']}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"


def _read(entry: Path, key: Key) -> Arrays | None:
    """The arrays of a whole and unaltered entry; otherwise nothing."""
    try:
        meta = json.loads((entry / "meta.json").read_bytes())
        files = sorted(entry.glob("*.npy"))
        if meta != _meta(key, files):
            return None
        # "c": writing to a mapped array changes this process's copy only, which is what torch wants to be able to do
        return {file.stem: np.load(file, mmap_mode="c", allow_pickle=False) for file in files}
    except (OSError, ValueError):
        return None


def _meta(key: Key, files: list[Path]) -> dict[str, Any]:
    return {"key": dict(key), "sha256": {file.name: _sha256(file) for file in files}}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(folder: Path, key: Key, arrays: Arrays) -> None:
    for name, array in arrays.items():
        with open(folder / f"{name}.npy", "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    write_json(folder / "meta.json", _meta(key, sorted(folder.glob("*.npy"))))


def _move(temporary: Path, entry: Path) -> None:
    """Puts a finished entry in its place, unless another process was first: then theirs stays."""
    try:
        os.rename(temporary, entry)
    except OSError:
        if not entry.exists():
            raise
    sync_folder(entry.parent)


def _sweep(entry: Path) -> None:
    """Removes what killed runs have left beside `entry`."""
    for path in entry.parent.glob(_temporary_name(entry, "*")):
        with suppress(OSError):  # another process may sweep at the same time
            if time.time() - path.stat().st_mtime > ABANDONED:
                shutil.rmtree(path)


def _remove(entry: Path) -> None:
    """Renamed first, so that no other process meets half an entry."""
    grave = _temporary(entry)
    with suppress(FileNotFoundError):  # another process has removed it
        os.rename(entry, grave)
    shutil.rmtree(grave, ignore_errors=True)


def _temporary(entry: Path) -> Path:
    return entry.with_name(_temporary_name(entry, uuid.uuid4().hex))


def _temporary_name(entry: Path, unique: str) -> str:
    return f".{entry.name}.{unique}.tmp"


def _say(text: str) -> None:
    Console(stderr=True).print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _clear_errors(folder: Path) -> Iterator[None]:
    """A failed write becomes one sentence with a way out."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise HoldfastError(
            f"the cache folder {folder} cannot be written ({reason}); "
            "set XDG_CACHE_HOME to a writable place with enough free space"
        ) from error
