"""The processor or GPU of a run: choosing it, using it deterministically, and naming it in results."""

import ctypes
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from holdfast.errors import HoldfastError


def choose_device(name: str) -> torch.device:
    """The device with this name; `auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise HoldfastError(f"unknown run.device={name!r}; use auto, cpu, cuda or cuda:<n>")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise HoldfastError(f"run.device={name!r}, but this machine has no such GPU; use auto or cpu")
    return device


def machine_of(device: torch.device) -> str:
    """What the last bits of a run depend on: processor, instruction set, torch."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = found[1] if found else name
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs all work with one thread, so that every engine gives the same bits; restores the previous settings."""
    threads, deterministic = torch.get_num_threads(), torch.backends.cudnn.deterministic
    _keep_freed_memory()
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.deterministic = deterministic


def _keep_freed_memory() -> None:
    """Tells glibc to keep freed memory for the next batch. Otherwise it returns the memory to the system after every
    batch, and the system has to clear it again: an eighth of the small network's time."""
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    with suppress(OSError, AttributeError):  # another libc
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 25)  # the largest value that glibc allows
