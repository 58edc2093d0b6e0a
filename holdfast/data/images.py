"""ImageSet: uint8 images and labels, in memory or memory-mapped; DataSet: a training and a test set of one origin."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageSet:
    """Images of one size with the index of each one's class."""

    images: Tensor  # (N, 3, S, S) uint8
    labels: Tensor  # (N,) int64, index into the data set's class names

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def by_class(self) -> dict[int, Tensor]:
        """The indices of each class's images, ascending."""
        order = torch.argsort(self.labels, stable=True)
        values, counts = torch.unique_consecutive(self.labels[order], return_counts=True)
        return dict(zip(values.tolist(), torch.split(order, counts.tolist()), strict=True))

    def select(self, classes: list[int], per_class: int | None) -> "ImageSet":
        """The first `per_class` images of each of `classes`, which become classes 0, 1, 2, ..."""
        rows = [self.by_class[c][:per_class] for c in classes]
        labels = [torch.full((len(r),), i, dtype=torch.int64) for i, r in enumerate(rows)]
        return ImageSet(self.images[torch.cat(rows)], torch.cat(labels))


@dataclass(frozen=True)
class DataSet:
    """What a source delivers: class names, a training set, a test set, and how its pixels want to be treated."""

    name: str
    classes: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    flip: bool  # may an image be mirrored and still be of its class?

    @property
    def size(self) -> int:
        return int(self.train.images.shape[-1])

    def lay_out(self, folder: Path) -> None:
        """Writes everything to files that several processes can map into their memory."""
        for split in ("train", "test"):
            part: ImageSet = getattr(self, split)
            np.save(folder / f"{split}_images.npy", part.images.numpy(), allow_pickle=False)
            np.save(folder / f"{split}_labels.npy", part.labels.numpy(), allow_pickle=False)
        facts = {key: getattr(self, key) for key in ("name", "classes", "mean", "std", "flip")}
        (folder / "data.json").write_text(json.dumps(facts))

    @staticmethod
    def mapped(folder: Path) -> "DataSet":
        """The data set that was laid out there; its images are in memory once, whoever maps them."""
        facts = json.loads((folder / "data.json").read_bytes())

        def part(split: str) -> ImageSet:
            # "c": a mapped array that one may write to, because torch wants to be able to
            images = np.load(folder / f"{split}_images.npy", mmap_mode="c", allow_pickle=False)
            return ImageSet(torch.from_numpy(images), torch.from_numpy(np.load(folder / f"{split}_labels.npy")))

        sequences = {key: tuple(facts[key]) for key in ("classes", "mean", "std")}
        return DataSet(facts["name"], train=part("train"), test=part("test"), flip=facts["flip"], **sequences)

    def select(self, classes: list[int], train_per_class: int | None, test_per_class: int | None) -> "DataSet":
        """The part of this data set that has only these classes, in this order."""
        return replace(
            self,
            classes=tuple(self.classes[c] for c in classes),
            train=self.train.select(classes, train_per_class),
            test=self.test.select(classes, test_per_class),
        )
