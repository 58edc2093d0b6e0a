"""Atomic writes, so that a reader sees the old file or the new one but never half of one; file checksums."""

import errno
import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError


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


def unfinished(path: Path) -> bool:
    """Is this a temporary file that `write_atomic` leaves behind when its process is killed?"""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


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
