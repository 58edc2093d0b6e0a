"""CIFAR-100 as its authors publish it: the binary or the Python archive, or either one's unpacked folder."""

import hashlib
import lzma
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from holdfast.data.cache import Key, cached
from holdfast.data.tarballs import open_tar
from holdfast.data.unpickled import read_pickle
from holdfast.errors import HoldfastError
from holdfast.files import read_limited

MEAN = (0.5071, 0.4867, 0.4408)
STD = (0.2675, 0.2565, 0.2761)

SIZE, PIXELS = 32, 3 * 32 * 32
BINARY, PYTHON = "cifar-100-binary", "cifar-100-python"
PATTERNS = (f"{PYTHON}.tar.gz", f"{BINARY}.tar.gz", PYTHON, BINARY)
LARGEST = 200_000_000  # bytes of a file; the training images have 155 MB
FORMAT = 1  # version of the cached arrays
Read = Callable[[str], bytes]  # reads a file of the archive or folder by its name


def load(source: Path, size: int, cache: Path) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """Class names, and train_images, train_labels, test_images, test_labels; images (N, 3, 32, 32) uint8."""
    if size != SIZE:
        raise HoldfastError(f"data.size={size}, but CIFAR-100 has images of {SIZE} pixels; leave data.size out")
    try:
        if source.is_dir():
            return _from_folder(source, cache)
        with open_tar(source) as archive:
            members = archive.members

            def read(name: str) -> bytes:
                if name not in members:
                    _unfit(source, f"{name} is missing")
                return archive.read(name, LARGEST)

            content = sorted((member.name, member.size, member.mtime) for member in members.values())
            archive.read_to_the_end()
            return _arrays(source, read, "train.bin" in members, repr(content), cache)
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error, ValueError) as error:
        reason = " ".join(str(error).split())
        raise HoldfastError(f"{source} cannot be read ({reason}); download it again or correct data.path") from error


def _from_folder(source: Path, cache: Path) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    inner = [source / name for name in (PYTHON, BINARY) if (source / name).is_dir()]
    folder = inner[0] if inner else source

    def read(name: str) -> bytes:
        if not (folder / name).is_file():
            _unfit(source, f"{name} is missing")
        return read_limited(folder / name, LARGEST)

    content = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in folder.iterdir() if f.is_file())
    return _arrays(source, read, (folder / "train.bin").is_file(), repr(content), cache)


def _arrays(
    source: Path, read: Read, binary: bool, content: str, cache: Path
) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    names = _names(source, read, binary)
    identity = hashlib.sha256(content.encode()).hexdigest()
    key: Key = {"name": "cifar100", "format": FORMAT, "identity": identity}
    split = _binary_split if binary else _python_split

    def make() -> dict[str, np.ndarray]:
        parts: dict[str, np.ndarray] = {}
        for part in ("train", "test"):
            images, labels = split(source, read, part)
            if len(labels) == 0 or labels.min() < 0 or labels.max() >= len(names):
                _unfit(source, f"the labels of {part} are not those of {len(names)} classes")
            if len(np.unique(labels)) < len(names):
                _unfit(source, f"a class of {part} has no images")
            parts |= {f"{part}_images": images.reshape(-1, 3, SIZE, SIZE), f"{part}_labels": labels.astype(np.int64)}
        return parts

    return names, cached(cache, key, make)


def _names(source: Path, read: Read, binary: bool) -> tuple[str, ...]:
    if binary:
        names = read("fine_label_names.txt").decode("utf-8", "replace").split()
    else:
        listed = _table(source, read("meta"), "meta").get("fine_label_names")
        names = [_text(name) for name in listed] if isinstance(listed, list) else []
    if not names or len(set(names)) != len(names):
        _unfit(source, "it names no classes, or names one twice")
    return tuple(names)


def _binary_split(source: Path, read: Read, part: str) -> tuple[np.ndarray, np.ndarray]:
    """A record is a coarse label, a fine label and the pixels, channel by channel."""
    blob = np.frombuffer(read(f"{part}.bin"), np.uint8)
    if len(blob) % (PIXELS + 2):
        _unfit(source, f"{part}.bin is cut short")
    records = blob.reshape(-1, PIXELS + 2)
    return np.ascontiguousarray(records[:, 2:]), records[:, 1].copy()


def _python_split(source: Path, read: Read, part: str) -> tuple[np.ndarray, np.ndarray]:
    table = _table(source, read(part), part)
    images, labels = table.get("data"), table.get("fine_labels")
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != PIXELS:
        _unfit(source, f"{part} holds no images of {SIZE} pixels")
    if not isinstance(labels, list) or len(labels) != len(images) or not all(type(label) is int for label in labels):
        _unfit(source, f"{part} has no label for each image")
    return images, np.array(labels)


def _table(source: Path, blob: bytes, name: str) -> dict[str, Any]:
    """A dictionary of the Python format, whose keys Python 2 wrote as bytes."""
    value = read_pickle(blob, f"{name} in {source}")
    if not isinstance(value, dict):
        _unfit(source, f"{name} holds no table")
    return {_text(key): item for key, item in value.items()}


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _unfit(source: Path, what: str) -> NoReturn:
    raise HoldfastError(f"{source} is not a complete CIFAR-100: {what}; download it again or correct data.path")
