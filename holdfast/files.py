"""Atomic writes, so that a reader sees the old file or the new one but never half of one; readers with limits; file
checksums."""

import errno
import hashlib
import json
import os
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError

DEEPEST = 20  # tables of a TOML file inside each other


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file by way of a temporary file, fsync, rename, and fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        what = "free space or choose" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "choose"
        raise HoldfastError(f"cannot write {path}: {error.strerror}; {what} another place") from error
    sync_folder(path.parent)


def read_limited(path: Path, most: int) -> bytes:
    """The content of a file; raises HoldfastError, before it is in memory, if it has more than `most` bytes."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size <= most:
            content = file.read(most + 1)  # devices and pipes have no size
            if len(content) <= most:
                return content
    raise HoldfastError(f"{path} has more than {most:,} bytes, which no such file needs; check what it is")


def parse_json(text: bytes | str, most: int = 2**24) -> Any:
    """The value of a JSON text; raises ValueError for anything else. `most` limits the number of values, because each
    takes up to thirty times as much memory as it has bytes of text."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if sum(map(raw.count, (b",", b"[", b"{"))) > most:
        raise ValueError("it has more values than any such file")
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; raises ValueError for anything else."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    inside: list[Any] = [tables]
    for _ in range(DEEPEST):
        inside = [value for one in inside for value in (one.values() if isinstance(one, dict) else one)]
        inside = [value for value in inside if isinstance(value, dict | list)]
        if not inside:
            return tables
    raise ValueError("its tables are nested too deeply")


def unfinished(path: Path) -> bool:
    """Is this a temporary file that `write_atomic` leaves behind when its process is killed?"""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, as_json(value))


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def sha256_of(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Makes a rename inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
