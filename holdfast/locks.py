"""Locks on open files between processes; a process that is killed releases its locks."""

from typing import IO, Any

from holdfast.errors import HoldfastError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def lock_file(file: int | IO[Any], wait: bool = True) -> None:
    """Locks the file for this process alone. If another process holds it: waits, or raises BlockingIOError."""
    if fcntl is None:
        raise HoldfastError(
            "this system has no file locks (fcntl), which runs and caches need; on Windows, use Holdfast inside WSL"
        )
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
