"""SOURCES: where images come from, an explicit table, name -> source."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from holdfast.data import cifar100, digits, glyphs, tiny_imagenet
from holdfast.data.cache import cache_folder, cached
from holdfast.data.images import DataSet, ImageSet
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.config import DataSettings


@dataclass(frozen=True)
class Source:
    """One data set: what it is, what its settings are if not given, and how it is read."""

    about: str
    defaults: Mapping[str, Any]
    load: "Callable[[DataSettings], DataSet]"


def data_root() -> Path | None:
    """The folder with the user's data sets: $HOLDFAST_DATA."""
    root = os.environ.get("HOLDFAST_DATA")
    return Path(root) if root else None


def load_data(settings: "DataSettings") -> DataSet:
    """The part of the data set that the settings ask for."""
    if settings.path and settings.name in ("glyphs", "digits"):
        raise HoldfastError(
            f"data.path={settings.path!r} is of no use to {settings.name}, which needs no file; leave it out"
        )
    data = SOURCES[settings.name].load(settings)
    count = len(data.classes) - settings.first_class if settings.classes is None else settings.classes
    if count < 1 or settings.first_class + count > len(data.classes):
        raise HoldfastError(
            f"{settings.name} has {len(data.classes)} classes, not {settings.first_class + max(count, 1)}; "
            "lower data.classes or data.first_class"
        )
    chosen = list(range(settings.first_class, settings.first_class + count))
    return data.select(chosen, settings.train_per_class, settings.test_per_class)


def _dataset(name: str, classes: tuple[str, ...], arrays: Mapping[str, np.ndarray], module: Any, flip: bool) -> DataSet:
    train, test = (
        ImageSet(torch.from_numpy(arrays[f"{split}_images"]), torch.from_numpy(np.array(arrays[f"{split}_labels"])))
        for split in ("train", "test")
    )
    return DataSet(name, classes, train, test, module.MEAN, module.STD, flip)


def _glyphs(settings: "DataSettings") -> DataSet:
    # The defaults make these three numbers; a glyph set has as many classes as one asks for.
    count = (settings.classes or 0) + settings.first_class
    train, test, size = settings.train_per_class or 0, settings.test_per_class or 0, settings.size or 0
    names = tuple(glyphs.class_characters(count, settings.seed))
    key: dict[str, str | int | float] = {
        "name": "glyphs",
        "count": count,
        "train": train,
        "test": test,
        "size": size,
        "seed": settings.seed,
        "version": 1,
    }
    arrays = cached(cache_folder(), key, lambda: glyphs.render(count, train, test, size, settings.seed))
    return _dataset("glyphs", names, arrays, glyphs, flip=False)


def _digits(settings: "DataSettings") -> DataSet:
    return _dataset("digits", digits.CLASSES, digits.load(settings.size or 0), digits, flip=False)


def _tiny_imagenet(settings: "DataSettings") -> DataSet:
    source = tiny_imagenet.find(Path(settings.path).expanduser() if settings.path else None, data_root())
    names, arrays = tiny_imagenet.load(source, settings.size or 0, cache_folder())
    return _dataset("tiny-imagenet", names, arrays, tiny_imagenet, flip=True)


def _cifar100(settings: "DataSettings") -> DataSet:
    source = cifar100.find(Path(settings.path).expanduser() if settings.path else None, data_root())
    names, arrays = cifar100.load(source, settings.size or 0, cache_folder())
    return _dataset("cifar100", names, arrays, cifar100, flip=True)


SOURCES: dict[str, Source] = {
    "glyphs": Source(
        "characters drawn from the fonts inside matplotlib; needs no download",
        {"classes": 25, "train_per_class": 100, "test_per_class": 40, "size": 32},
        _glyphs,
    ),
    "digits": Source("scikit-learn's 1,797 handwritten digits; needs no download", {"size": 32}, _digits),
    "cifar100": Source("CIFAR-100, from an official archive (Python or binary) or its folder", {"size": 32}, _cifar100),
    "tiny-imagenet": Source("TinyImageNet, from the official zip or its folder", {"size": 64}, _tiny_imagenet),
}
