"""SOURCES: the built-in data sets, name -> source; SOURCE_TABLE: these and everybody else's."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.data import cifar100, digits, folder, glyphs, imagenet, mini_imagenet, tiny_imagenet, tree
from holdfast.data.cache import Entry, cache_folder, cached
from holdfast.data.images import DataSet, Images, ImageSet
from holdfast.data.settings import DataSettings
from holdfast.errors import HoldfastError, complain, nearest
from holdfast.extensions import Table

NAMED = 5  # unreadable files listed in a message


@dataclass(frozen=True)
class Download:
    """A file that can be downloaded, with its size and checksum."""

    url: str
    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """One data set: what it is, the defaults of its settings, how it is read, and how to get it."""

    title: str
    about: str
    defaults: Mapping[str, Any]
    load: "Callable[[DataSettings], DataSet]"
    patterns: tuple[str, ...] = ()  # file names below the data root; empty: it needs no file
    origin: str = "generated"
    licence: str = "none needed"
    official: str = ""  # what the complete data set has
    download: Download | None = None
    obtain: str = ""  # how to get a data set that cannot be downloaded directly
    takes_path: bool = False  # does it read data.path by itself?


def data_root() -> Path:
    """The folder with the user's data sets: $HOLDFAST_DATA, or a folder inside the cache."""
    root = os.environ.get("HOLDFAST_DATA")
    return Path(root).expanduser() if root else cache_folder() / "data"


def source_of(name: str) -> Source:
    """The source with this name; the name of a user's own images contains their path: folder:<path>."""
    kind = name.partition(":")[0] if name.startswith("folder:") else name
    if not SOURCE_TABLE.knows(kind):
        raise HoldfastError(f"unknown data set {name!r}; {nearest(name, [*SOURCE_TABLE.all(), 'folder:<path>'])}")
    return SOURCE_TABLE.find(kind)


def check_source(name: str, thing: Any) -> Source:
    """A source, or a function that takes the settings and returns the data, as a source."""
    if isinstance(thing, Source):
        return thing
    if isinstance(thing, type) or not callable(thing):
        raise HoldfastError(
            f"the data set {name!r} is neither a function of DataSettings nor a Source; see docs/extending.md"
        )
    about = (thing.__doc__ or "").strip().split("\n")[0] or "a data set of your own"
    return Source(name, about, {}, thing, origin="your own function", licence="yours", takes_path=True)


def register_dataset(name: str, load: "Callable[[DataSettings], DataSet] | Source | None" = None) -> Any:
    """Makes a data set known in this process under this name: a function that takes `DataSettings` and returns a
    `DataSet`, or a `Source`. Also a decorator: `@register_dataset("cells")`."""

    def register(thing: Any) -> Any:
        SOURCE_TABLE.register(name, thing)
        return thing

    return register if load is None else register(load)


def load_data(settings: DataSettings) -> DataSet:
    """The part of the data set that the settings ask for."""
    source = source_of(settings.name)
    if settings.path and not source.patterns and not source.takes_path:
        raise HoldfastError(f"data.path={settings.path!r} has no effect for {settings.name}; leave it out")
    if settings.test_share and "test_share" not in source.defaults:
        raise HoldfastError(f"{settings.name} has its own test images; leave data.test_share out")
    data = source.load(settings)
    if not isinstance(data, DataSet):
        raise HoldfastError(f"the data set {settings.name!r} gives a {type(data).__name__}, not a DataSet")
    if data.unreadable:
        _complain(settings, data)
    count = len(data.classes) - settings.first_class if settings.classes is None else settings.classes
    if count < 1 or settings.first_class + count > len(data.classes):
        raise HoldfastError(
            f"{settings.name} has {len(data.classes)} classes, not {settings.first_class + max(count, 1)}; "
            "lower data.classes or data.first_class"
        )
    chosen = list(range(settings.first_class, settings.first_class + count))
    part = data.select(chosen, settings.train_per_class, settings.test_per_class)
    return part if settings.flip is None else replace(part, flip=settings.flip)


def _complain(settings: DataSettings, data: DataSet) -> None:
    """Names the images that cannot be read: in an error, or in a warning if the settings allow to skip them."""
    count, total = len(data.unreadable), len(data.train) + len(data.test) + len(data.unreadable)
    named = "; ".join(sentence.split(";")[0] for sentence in data.unreadable[:NAMED])
    more = f"; and {count - NAMED} more (holdfast data check)" if count > NAMED else ""
    if settings.corrupt != "skip":
        raise HoldfastError(
            f"{count} of {total} images cannot be used: {named}{more}; replace or remove them, or set data.corrupt=skip"
        )
    complain(f"{count} of {total} images are skipped: {named}{more}")
    for kind, part in (("training", data.train), ("test", data.test)):
        for c, name in enumerate(data.classes):
            if c not in part.by_class:
                raise HoldfastError(f"no {kind} image of the class {name!r} can be read; replace them or drop it")


def _dataset(name: str, classes: tuple[str, ...], arrays: Mapping[str, np.ndarray], module: Any, flip: bool) -> DataSet:
    train, test = (
        ImageSet(Images.of(arrays[f"{split}_images"]), torch.from_numpy(np.array(arrays[f"{split}_labels"])))
        for split in ("train", "test")
    )
    return DataSet(name, classes, train, test, module.MEAN, module.STD, flip)


def _decoded(name: str, classes: tuple[str, ...], entry: Entry, module: Any, flip: bool) -> DataSet:
    """A data set of decoded files, some of which may be unreadable."""
    data = _dataset(name, classes, entry.arrays, module, flip)
    return replace(data, unreadable=tuple(entry.facts["unreadable"]))


def _readable(data: DataSet) -> DataSet:
    """The data set without unreadable images, which have the label -1."""
    if not data.unreadable:
        return data
    train, test = (part.take(torch.nonzero(part.labels >= 0)[:, 0]) for part in (data.train, data.test))
    return replace(data, train=train, test=test)


def _glyphs(settings: DataSettings) -> DataSet:
    # The defaults ensure that none of these is None; glyphs has as many classes as are requested.
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


def _digits(settings: DataSettings) -> DataSet:
    return _dataset("digits", digits.CLASSES, digits.load(settings.size or 0), digits, flip=False)


def _cifar100(settings: DataSettings) -> DataSet:
    names, arrays = cifar100.load(place_of(settings), settings.size or 0, cache_folder())
    return _dataset("cifar100", names, arrays, cifar100, flip=True)


def _from_files(module: Any) -> "Callable[[DataSettings], DataSet]":
    def load(settings: DataSettings) -> DataSet:
        names, entry = module.load(place_of(settings), settings.size or 0, cache_folder())
        return _readable(_decoded(settings.name, names, entry, module, flip=True))

    return load


def _folder(settings: DataSettings) -> DataSet:
    share = settings.test_share or 0.0  # the default ensures that it is not None
    found = folder.load(place_of(settings), settings.size or 0, cache_folder(), share, settings.seed)
    data = _decoded(settings.name, found.names, found.entry, folder, flip=False)
    data = replace(data, clients=found.clients, stream=found.stream)
    if found.owners is not None:
        data = replace(data, train=replace(data.train, owners=torch.from_numpy(found.owners)))
    return _readable(data)


def place_of(settings: DataSettings) -> Path:
    """The archive or folder that is read for these settings."""
    source = source_of(settings.name)
    path = settings.name.partition(":")[2] or settings.path
    if settings.name == "folder" and path is None:
        raise HoldfastError("the path of the images is missing; use --dataset folder:<path>, or set data.path")
    return tree.find(source.title, path, data_root(), source.patterns, settings.name)


SOURCES: dict[str, Source] = {
    "glyphs": Source(
        "Glyphs",
        "characters drawn with the fonts that matplotlib includes; needs no download",
        {"classes": 25, "train_per_class": 100, "test_per_class": 40, "size": 32},
        _glyphs,
        licence="the fonts' own (Bitstream Vera and DejaVu, STIX): free to use",
    ),
    "digits": Source(
        "Digits",
        "scikit-learn's 1,797 handwritten digits; needs no download",
        {"size": 32},
        _digits,
        origin="inside scikit-learn (UCI, Alpaydin and Kaynak, 1998)",
        licence="CC BY 4.0",
    ),
    "cifar100": Source(
        "CIFAR-100",
        "CIFAR-100, from an official archive (Python or binary) or its folder",
        {"size": 32},
        _cifar100,
        patterns=cifar100.PATTERNS,
        origin="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence="none stated; its authors ask to be cited (Krizhevsky, 2009)",
        official="100 classes, 500 training and 100 test images each, 32 px",
        download=Download(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "cifar-100-binary.tar.gz",
            168_513_733,
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
    ),
    "mini-imagenet": Source(
        "MiniImageNet",
        "MiniImageNet: 100 class folders, or the three folders of few-shot learning; a folder or a zip",
        {"size": 84},
        _from_files(mini_imagenet),
        patterns=mini_imagenet.PATTERNS,
        origin="Vinyals et al., 2016; a part of ImageNet",
        licence="ImageNet's: research only, https://www.image-net.org/download",
        official="100 classes, 500 training and 100 test images each",
        obtain="take the 600 images of each of its 100 classes from your own copy of ImageNet",
    ),
    "tiny-imagenet": Source(
        "TinyImageNet",
        "TinyImageNet, from the official zip or its folder",
        {"size": 64},
        _from_files(tiny_imagenet),
        patterns=tiny_imagenet.PATTERNS,
        origin="http://cs231n.stanford.edu",
        licence="ImageNet's: research only, https://www.image-net.org/download",
        official="200 classes, 500 training and 50 test images each, 64 px",
        download=Download(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "tiny-imagenet-200.zip",
            248_100_043,
            "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
        ),
    ),
    "imagenet": Source(
        "ImageNet",
        "ImageNet (ILSVRC 2012): train/<class>/ and val/, in class folders or flat with a mapping file",
        {"size": 224},
        _from_files(imagenet),
        patterns=imagenet.PATTERNS,
        origin="https://www.image-net.org",
        licence="research only, after signing up: https://www.image-net.org/download",
        official="1,000 classes, 1,281,167 training and 50,000 validation images",
        obtain="sign up at https://www.image-net.org/download, and unpack ILSVRC2012 training and validation images",
    ),
    "folder": Source(
        "image folder",
        "your own images: folder:<path> with train/<class>/ and test/<class>/, <class>/, or clients/<client>/<class>/",
        {"size": 64, "test_share": 0.2},
        _folder,
        patterns=("folder",),
        origin="yours",
        licence="yours",
        obtain="give the path of your images: folder:<path>",
    ),
}

SOURCE_TABLE: Table[Source] = Table("data set", "holdfast.datasets", SOURCES, check_source)
