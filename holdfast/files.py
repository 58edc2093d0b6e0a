"""Atomic writes, so that a reader sees the old file or the new one but never half of one; readers with limits; file
checksums."""

import errno
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError

MOST_VALUES = 2**24  # in a JSON text
LONGEST = 2**21  # characters of a TOML text
DEEPEST = 20  # lists and tables inside each other
HUGE = re.compile(r"\b0[xob][0-9a-fA-F_]{300}")  # Python cannot write such a number in an error
DEEP = "its lists and tables are nested too deeply"
QUOTED = re.compile(r"'''.*?'''|\"{3}(?:\\.|[^\\])*?\"{3}|'[^'\n]*'|\"(?:\\.|[^\"\\\n])*\"|#[^\n]*", re.DOTALL)
DOTTED = re.compile(rf"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){{{DEEPEST}}}")


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
        size = os.fstat(file.fileno()).st_size
        if size <= most:
            parts = [file.read(size + 1)]
            while (total := sum(map(len, parts))) <= most and (more := file.read(2**20)):
                parts.append(more)  # devices and pipes have no size
            if total <= most:
                return b"".join(parts)
    raise HoldfastError(f"{path} has more than {most:,} bytes, which no such file needs; check what it is")


def parse_json(text: bytes | str, constant: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text; raises ValueError for anything else. The number of values is limited, because each
    takes up to thirty times as much memory as text. `constant` is called for NaN and infinities."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if sum(map(raw.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ValueError("it has more values than any such file")
    try:
        value = json.loads(raw, parse_constant=constant)
    except RecursionError:
        raise ValueError(DEEP) from None
    if raw.count(b"[") + raw.count(b"{") > DEEPEST:
        _check_depth(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; raises ValueError for anything else. Long dotted keys are refused before they are
    parsed, because that takes the square of their length."""
    if len(text) > LONGEST:
        raise ValueError(f"it has more than {LONGEST:,} characters")
    if DOTTED.search(QUOTED.sub("s", text)):
        raise ValueError(DEEP)
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError(DEEP) from None
    _check_depth(tables)
    if HUGE.search(text):
        raise ValueError("it has a number of more digits than any setting")
    return tables


def _check_depth(value: Any) -> None:
    """Raises ValueError for values that a recursive function, such as `repr`, cannot follow."""
    inside = [value]
    for _ in range(DEEPEST):
        inside = [
            inner
            for one in inside
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not inside:
            return
    raise ValueError(DEEP)


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
    """Makes a rename inside `folder` survive a power cut; Windows cannot open folders for that."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
