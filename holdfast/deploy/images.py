"""A site's folder of images: what is there now, which part is held out, and its pixels.

Whether an image is held out follows from its content alone, so it stays on its side whatever comes or goes."""

import hashlib
import io
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast.data.decode import LARGEST, decode_image
from holdfast.data.images import Images, ImageSet
from holdfast.data.tree import is_image, readable
from holdfast.errors import HoldfastError
from holdfast.files import LONGEST, parse_toml, read_limited

SETTLED = 2.0  # seconds since its last change after which a file counts as complete
CLASSES = "classes.toml"

log = logging.getLogger("holdfast.deploy")

Listing = dict[str, list[list[str | int]]]  # class -> [relative path, size, time of change], sorted by path


@dataclass(frozen=True)
class Part:
    """Images of some classes: pixels (N, 3, S, S), and the files of each class in their order."""

    files: Mapping[str, list[str]]
    pixels: Tensor

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.files)

    @property
    def holdings(self) -> dict[str, Tensor]:
        """The ids of each class's images."""
        ends = np.cumsum([len(files) for files in self.files.values()]).tolist()
        return {
            name: torch.arange(end - len(files), end)
            for (name, files), end in zip(self.files.items(), ends, strict=True)
        }

    @property
    def images(self) -> ImageSet:
        counts = torch.tensor([len(files) for files in self.files.values()], dtype=torch.int64)
        return ImageSet(Images(self.pixels), torch.repeat_interleave(torch.arange(len(counts)), counts))


@dataclass
class Folder:
    """A watched folder: one folder of images per class, and perhaps classes.toml with the agreed names."""

    place: Path
    size: int
    share: float  # of each class's images that is held out
    most: int  # held-out images of a class
    settled: float = SETTLED
    _decoded: dict[tuple[str, int, int], tuple[bool, np.ndarray] | None] = field(default_factory=dict)

    def listing(self) -> Listing:
        """What is there now, by agreed class names. Files that are still being written are left for later."""
        names, young = self.names(), time.time() - self.settled
        found: Listing = {}
        try:
            folders = sorted(entry.name for entry in os.scandir(self.place) if entry.is_dir())
        except OSError as error:
            raise HoldfastError(f"cannot read the images in {self.place}: {error.strerror}") from error
        for local in folders:
            if local.startswith("."):
                continue
            for where, _, files in sorted(os.walk(self.place / local)):
                for file in sorted(files):
                    path = os.path.relpath(os.path.join(where, file), self.place)
                    if file.startswith(".") or not is_image(file):
                        continue
                    try:
                        stat = os.stat(self.place / path)
                    except OSError:
                        continue  # it has just left
                    if stat.st_mtime <= young:
                        entry: list[str | int] = [path, stat.st_size, stat.st_mtime_ns]
                        found.setdefault(names.get(local, readable(local)), []).append(entry)
        return {name: sorted(found[name], key=lambda entry: str(entry[0])) for name in sorted(found)}

    def names(self) -> dict[str, str]:
        """Local folder names -> agreed class names."""
        file = self.place / CLASSES
        if not file.exists():
            return {}
        try:
            table = parse_toml(read_limited(file, LONGEST).decode("utf-8-sig"))
        except (OSError, ValueError) as error:
            raise HoldfastError(
                f'{file} cannot be read ({error}); it has lines such as "local name" = "name"'
            ) from error
        if not all(isinstance(value, str) for value in table.values()):
            raise HoldfastError(f'{file} should have lines such as "local name" = "agreed name" only')
        return {local: readable(name) for local, name in table.items()}

    def load(self, listing: Listing) -> tuple[Part, Part]:
        """The images for training and those that are held out."""
        current: dict[tuple[str, int, int], tuple[bool, np.ndarray] | None] = {}
        parts: list[tuple[dict[str, list[str]], list[np.ndarray]]] = [({}, []), ({}, [])]
        for name, entries in listing.items():
            held = 0
            for path, size, changed in entries:
                key = str(path), int(size), int(changed)
                current[key] = self._decoded[key] if key in self._decoded else self._read(str(path))
                one = current[key]
                if one is None:
                    continue
                aside = one[0] and held < self.most
                held += aside
                files, pixels = parts[aside]
                files.setdefault(name, []).append(str(path))
                pixels.append(one[1])
        self._decoded = current
        empty = np.zeros((0, 3, self.size, self.size), np.uint8)
        return tuple(  # type: ignore[return-value]
            Part(files, torch.from_numpy(np.stack(pixels) if pixels else empty)) for files, pixels in parts
        )

    def _read(self, path: str) -> tuple[bool, np.ndarray] | None:
        """Is this image held out, and its pixels; None if it cannot be read."""
        try:
            content = read_limited(self.place / path, LARGEST)
            pixels = decode_image(io.BytesIO(content), self.size, path)
        except (OSError, HoldfastError) as error:
            log.warning("an image is left out: %s", error)
            return None
        return held_out(content, self.share), pixels


def held_out(content: bytes, share: float) -> bool:
    """Is the image of a file with this content held out?"""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") < share * 2**64


def same_spelling(name: str, known: str) -> bool:
    """Do these names differ only in case or blanks?"""
    return name != known and "".join(name.split()).casefold() == "".join(known.split()).casefold()
