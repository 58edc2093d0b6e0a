"""ImageSet: uint8 images and labels, in memory or memory-mapped; DataSet: a training set and a test set."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Images:
    """A selection of the images of a file or a tensor, in any order; only the images that are needed are read."""

    def __init__(self, stored: Tensor, rows: Tensor | None = None, file: Path | None = None) -> None:
        self.stored = stored  # (M, 3, S, S) uint8
        self.rows = torch.arange(len(stored)) if rows is None else rows  # (N,)
        self.file = file  # the .npy file that `stored` is mapped from, if any

    @staticmethod
    def of(array: np.ndarray) -> "Images":
        file = Path(str(array.filename)) if isinstance(array, np.memmap) and array.filename else None
        return Images(torch.from_numpy(array), file=file)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: Tensor | int | slice) -> Tensor:
        return self.stored[self.rows[chosen]]

    @property
    def size(self) -> int:
        return int(self.stored.shape[-1])

    def take(self, chosen: Tensor) -> "Images":
        return Images(self.stored, self.rows[chosen], self.file)

    def lay_out(self, folder: Path, name: str) -> dict[str, str]:
        """Makes sure that other processes can map the images; returns the file to map."""
        np.save(folder / f"{name}_rows.npy", self.rows.numpy(), allow_pickle=False)
        if self.file is None:
            np.save(folder / f"{name}_images.npy", self.stored.numpy(), allow_pickle=False)
        return {name: str(self.file or folder / f"{name}_images.npy")}

    @staticmethod
    def mapped(folder: Path, name: str, file: str) -> "Images":
        # "c" (copy on write): torch requires writable arrays
        images = Images.of(np.load(file, mmap_mode="c", allow_pickle=False))
        return images.take(torch.from_numpy(np.load(folder / f"{name}_rows.npy", allow_pickle=False)))


@dataclass(frozen=True)
class ImageSet:
    """Images of one size, each with the index of its class."""

    images: Images
    labels: Tensor  # (N,) int64, index into the data set's class names
    owners: Tensor | None = None  # (N,) int64, index into the data set's clients, if the images have owners

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def by_class(self) -> dict[int, Tensor]:
        """The indices of each class's images, ascending."""
        order = torch.argsort(self.labels, stable=True)
        values, counts = torch.unique_consecutive(self.labels[order], return_counts=True)
        return dict(zip(values.tolist(), torch.split(order, counts.tolist()), strict=True))

    def class_of(self, rows: Tensor) -> Tensor:
        """The index of each image's class (N,)."""
        return self.labels[rows]

    def pixels(self, rows: Tensor) -> Tensor:
        """The images (N, 3, S, S) as uint8."""
        return self.images[rows]

    def _first(self, rows: Tensor, count: int | None) -> Tensor:
        if self.owners is None or count is None:
            return rows[:count]
        owners = self.owners[rows]
        return torch.cat([rows[owners == owner][:count] for owner in owners.unique()]).sort().values

    def take(self, rows: Tensor) -> "ImageSet":
        owners = None if self.owners is None else self.owners[rows]
        return ImageSet(self.images.take(rows), self.labels[rows], owners)

    def select(self, classes: list[int], per_class: int | None) -> "ImageSet":
        """The first `per_class` images of each of `classes`, which become classes 0, 1, 2, ...; per client if the
        images have owners."""
        rows = [self._first(self.by_class[c], per_class) for c in classes]
        labels = [torch.full((len(r),), i, dtype=torch.int64) for i, r in enumerate(rows)]
        return replace(self.take(torch.cat(rows)), labels=torch.cat(labels))


@dataclass(frozen=True)
class Stream:
    """When classes reach the clients of a federated folder, and leave them: (round from 0, client, names of the classes
    that come, names of those that leave), and its length."""

    arrivals: tuple[tuple[int, int, tuple[str, ...], tuple[str, ...]], ...]
    rounds: int | None  # in total, if given


@dataclass(frozen=True)
class DataSet:
    """What a source provides: class names, a training set, a test set, and how to normalise and augment its images."""

    name: str
    classes: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    flip: bool  # is a mirrored image still of its class?
    clients: tuple[str, ...] = ()  # names, if the images have owners
    stream: Stream | None = None
    unreadable: tuple[str, ...] = field(default=(), compare=False)  # files that were skipped

    @property
    def size(self) -> int:
        return self.train.images.size

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all images, labels and owners, and of the stream; cached images count by their entry's name."""
        digest = hashlib.sha256(repr((self.classes, self.clients, self.stream)).encode("utf-8", "surrogateescape"))
        for part in (self.train, self.test):
            file = part.images.file
            digest.update(f"{file.parent.name}/{file.name}".encode() if file else part.images.stored.numpy().tobytes())
            for indices in (part.images.rows, part.labels, part.owners):
                digest.update(b"" if indices is None else indices.numpy().tobytes())
        return digest.hexdigest()[:16]

    def lay_out(self, folder: Path) -> None:
        """Writes what the rounds need to files that several processes can map into their memory."""
        facts: dict[str, Any] = {key: getattr(self, key) for key in ("name", "classes", "mean", "std", "flip")}
        facts["files"] = {}
        for name, part in (("train", self.train), ("test", self.test)):
            facts["files"] |= part.images.lay_out(folder, name)
            np.save(folder / f"{name}_labels.npy", part.labels.numpy(), allow_pickle=False)
        if self.train.owners is not None:
            np.save(folder / "owners.npy", self.train.owners.numpy(), allow_pickle=False)
        stream = self.stream and {"arrivals": self.stream.arrivals, "rounds": self.stream.rounds}
        (folder / "data.json").write_text(json.dumps({**facts, "clients": self.clients, "stream": stream}))

    @staticmethod
    def mapped(folder: Path) -> "DataSet":
        """The data set that was laid out there; all processes that map it share its images in memory."""
        facts = json.loads((folder / "data.json").read_bytes())
        owners = torch.from_numpy(np.load(folder / "owners.npy")) if (folder / "owners.npy").exists() else None
        stream = facts["stream"] and Stream(
            tuple(
                (index, client, tuple(came), tuple(left)) for index, client, came, left in facts["stream"]["arrivals"]
            ),
            facts["stream"]["rounds"],
        )

        def part(name: str, owners: Tensor | None) -> ImageSet:
            images = Images.mapped(folder, name, facts["files"][name])
            return ImageSet(images, torch.from_numpy(np.load(folder / f"{name}_labels.npy")), owners)

        sequences = {key: tuple(facts[key]) for key in ("classes", "mean", "std", "clients")}
        return DataSet(
            facts["name"],
            train=part("train", owners),
            test=part("test", None),
            flip=facts["flip"],
            stream=stream or None,
            **sequences,
        )

    def select(self, classes: list[int], train_per_class: int | None, test_per_class: int | None) -> "DataSet":
        """The part of this data set that has only these classes, in this order."""
        return replace(
            self,
            classes=tuple(self.classes[c] for c in classes),
            train=self.train.select(classes, train_per_class),
            test=self.test.select(classes, test_per_class),
        )
