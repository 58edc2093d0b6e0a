"""TinyImageNet as its authors publish it, the zip or the unpacked folder, at any image size; decoded once."""

import hashlib
import json
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from holdfast.data.cache import Key, cached
from holdfast.data.decoding import decode_files
from holdfast.errors import HoldfastError

MEAN = (0.4802, 0.4481, 0.3975)
STD = (0.2770, 0.2691, 0.2821)

TOP = "tiny-imagenet-200"
FORMAT = 1  # of the cached arrays; a new number makes every cache anew
TRAIN_IMAGE = re.compile(r"train/([^/]+)/images/\1_(\d+)\.JPEG")


@dataclass(frozen=True)
class Source:
    """The files of an archive or a folder, by their names below tiny-imagenet-200/."""

    where: Path
    identity: str  # changes whenever the content does
    names: frozenset[str]
    read: Callable[[str], bytes]
    place: Path  # the zip file, or the folder that the names are below
    prefix: str  # of the names in a zip file

    def decode(self, files: list[str], size: int, text: str) -> np.ndarray:
        """The images of `files`: (N, 3, size, size) uint8."""
        return decode_files(self.place, [self.prefix + name for name in files], size, text)


@dataclass(frozen=True)
class Split:
    """Which files hold the images of a split, and the class index of each."""

    files: list[str]
    labels: np.ndarray  # (N,) int64


def find(path: Path | None, root: Path | None) -> Path:
    """The archive or folder to read: `path` itself, or whatever of TinyImageNet lies in `root`."""
    if path is not None:
        if os.path.exists(path):
            return path
        raise HoldfastError(f"there is no TinyImageNet at {path}; set data.path to its zip file or unpacked folder")
    advice = f"set data.path to the zip file or folder, or HOLDFAST_DATA to the folder that holds {TOP}.zip"
    if root is None:
        raise HoldfastError(f"nothing says where TinyImageNet is; {advice}")
    for candidate in (root / f"{TOP}.zip", root / TOP, *sorted(root.glob("tiny-imagenet*.zip"))):
        if os.path.exists(candidate):
            return candidate
    raise HoldfastError(f"{root} holds no {TOP}.zip, no {TOP} folder and no other tiny-imagenet*.zip; {advice}")


def load(source: Path, size: int, cache: Path) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """Class names, and train_images, train_labels, test_images, test_labels; images (N, 3, size, size) uint8."""
    with open_source(source) as archive:
        wnids = read_wnids(archive)
        key = _key(archive, size)
        return class_names(archive, wnids), cached(cache, key, lambda: _decode_both(archive, wnids, size))


def _key(source: Source, size: int) -> Key:
    return {"name": "tiny-imagenet", "size": size, "format": FORMAT, "identity": source.identity}


def read_wnids(source: Source) -> list[str]:
    """The classes, in the archive's own order."""
    wnids = list(dict.fromkeys(_text(source, "wnids.txt").split()))
    return wnids or _unfit(source, "wnids.txt lists no class")


def train_split(source: Source, wnids: list[str]) -> Split:
    """Every class's training images by ascending number, class after class."""
    numbered: dict[str, list[tuple[int, str]]] = {wnid: [] for wnid in wnids}
    for name in source.names:
        if (match := TRAIN_IMAGE.fullmatch(name)) and match[1] in numbered:
            numbered[match[1]].append((int(match[2]), name))
    return _split(source, wnids, ((name, wnid) for wnid in wnids for _, name in sorted(numbered[wnid])), "training")


def validation_split(source: Source, wnids: list[str]) -> Split:
    """The official validation images of these classes, in the order of val_annotations.txt."""
    lines = [line.split("\t") for line in _text(source, "val/val_annotations.txt").splitlines() if line.strip()]
    if not all(len(line) > 1 for line in lines):
        _unfit(source, "val/val_annotations.txt has a line without a tab between file and class")
    known = set(wnids)
    pairs = ((f"val/images/{line[0]}", line[1]) for line in lines if line[1] in known)
    return _split(source, wnids, pairs, "validation")


def class_names(source: Source, wnids: list[str]) -> tuple[str, ...]:
    """The first phrase of words.txt for each class; with the wnid where two share one, the wnid alone without any."""
    words = _text(source, "words.txt") if "words.txt" in source.names else ""
    lines = [line.partition("\t") for line in words.splitlines()]
    phrases = {wnid: text.partition(",")[0].strip() for wnid, _, text in lines}
    names = [phrases.get(wnid) or wnid for wnid in wnids]
    count = Counter(names)
    return tuple(name if count[name] == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True))


def _decode_both(source: Source, wnids: list[str], size: int) -> dict[str, np.ndarray]:
    train, test = train_split(source, wnids), validation_split(source, wnids)
    return {
        "train_images": source.decode(train.files, size, "TinyImageNet: training images"),
        "train_labels": train.labels,
        "test_images": source.decode(test.files, size, "TinyImageNet: test images"),
        "test_labels": test.labels,
    }


def _split(source: Source, wnids: list[str], pairs: Iterable[tuple[str, str]], kind: str) -> Split:
    """Files with class indices; every class must have some and every file must be there."""
    files_and_wnids = list(pairs)
    for name, _ in files_and_wnids:
        if name not in source.names:
            _unfit(source, f"{name} is missing")
    present = {wnid for _, wnid in files_and_wnids}
    for wnid in wnids:
        if wnid not in present:
            _unfit(source, f"class {wnid} of wnids.txt has no {kind} images")
    index = {wnid: i for i, wnid in enumerate(wnids)}
    labels = np.array([index[wnid] for _, wnid in files_and_wnids], np.int64)
    return Split([name for name, _ in files_and_wnids], labels)


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """The files behind `path`, a zip file or a folder."""
    if os.path.isdir(path):
        yield _folder(path)
        return
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:  # a damaged directory raises nearly any type
        reason = error.strerror if isinstance(error, OSError) else "damaged or not a zip file"
        raise HoldfastError(f"{path} cannot be opened ({reason}); get {TOP}.zip anew or correct data.path") from error
    with archive:
        yield _zip(path, archive)


def _zip(path: Path, archive: zipfile.ZipFile) -> Source:
    infos = {i.filename.removeprefix(f"{TOP}/"): i for i in archive.infolist()}
    content = [(i.filename, i.CRC, i.file_size) for i in archive.infolist()]

    def read(name: str) -> bytes:
        try:
            return archive.read(infos[name])
        except Exception as error:  # bad checksum, bad compression, encryption, a file cut short: each its own type
            raise HoldfastError(f"{name} in {path} cannot be read ({error}); get the archive anew") from error

    prefix = f"{TOP}/" if any(name.startswith(f"{TOP}/") for name, _, _ in content) else ""
    return Source(path, _digest(content), frozenset(infos), read, path, prefix)


def _folder(path: Path) -> Source:
    try:
        top = path / TOP if TOP in os.listdir(path) else path
        # Without wnids.txt it is some other folder, which may be endless.
        content = sorted(_files_below(top)) if "wnids.txt" in os.listdir(top) else []
    except OSError as error:
        _unreadable(error)

    def read(name: str) -> bytes:
        try:
            return (top / name).read_bytes()
        except OSError as error:
            _unreadable(error)

    return Source(path, _digest(content), frozenset(name for name, _, _ in content), read, top, "")


def _files_below(top: Path) -> Iterator[tuple[str, int, int]]:
    """Relative name, size and time of change of every file."""
    for folder, _, names in os.walk(top, onerror=_unreadable):
        for name in names:
            file = Path(folder, name)
            if file.is_file():  # no pipe to wait at, no link into nothing
                stat = file.stat()
                yield file.relative_to(top).as_posix(), stat.st_size, stat.st_mtime_ns


def _digest(content: list[tuple[str, int, int]]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _text(source: Source, name: str) -> str:
    if name not in source.names:
        _unfit(source, f"{name} is missing")
    try:
        return source.read(name).decode()
    except UnicodeDecodeError:
        _unfit(source, f"{name} is not UTF-8 text")


def _unfit(source: Source, what: str) -> NoReturn:
    raise HoldfastError(f"{source.where} is not a whole TinyImageNet: {what}; get {TOP}.zip anew or correct data.path")


def _unreadable(error: OSError) -> NoReturn:
    sentence = f"{error.filename} cannot be read ({error.strerror}); allow reading it or correct data.path"
    raise HoldfastError(sentence) from error
