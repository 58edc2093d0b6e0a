"""TinyImageNet as its authors publish it, the zip or the unpacked folder, at any image size."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import numpy as np

from holdfast.data.cache import Entry
from holdfast.data.decoded import Split, decoded
from holdfast.data.tree import Tree, open_tree
from holdfast.data.wordnet import class_names
from holdfast.errors import HoldfastError

MEAN = (0.4802, 0.4481, 0.3975)
STD = (0.2770, 0.2691, 0.2821)

TOP = "tiny-imagenet-200"
PATTERNS = (f"{TOP}.zip", TOP, "tiny-imagenet*.zip")
TRAIN_IMAGE = re.compile(r"train/([^/]+)/images/\1_(\d+)\.JPEG")


def load(source: Path, size: int, cache: Path) -> tuple[tuple[str, ...], Entry]:
    """Class names, and the decoded training and (official validation) test images."""
    with open_tree(source, TOP, mark="wnids.txt") as tree:
        wnids = read_wnids(tree)
        splits = {"train": train_split(tree, wnids), "test": validation_split(tree, wnids)}
        names = class_names(wnids, tree.text("words.txt") if "words.txt" in tree.names else "")
        key = {"name": "tiny-imagenet", "identity": tree.identity(splits)}
        return names, decoded(cache, key, tree.place, splits, size, "TinyImageNet")


def read_wnids(tree: Tree) -> list[str]:
    """The classes, in the archive's own order."""
    wnids = list(dict.fromkeys(_text(tree, "wnids.txt").split()))
    return wnids or _unfit(tree, "wnids.txt lists no class")


def train_split(tree: Tree, wnids: list[str]) -> Split:
    """The training images, class by class, each class sorted by image number."""
    numbered: dict[str, list[tuple[int, str]]] = {wnid: [] for wnid in wnids}
    for name in tree.names:
        if (match := TRAIN_IMAGE.fullmatch(name)) and match[1] in numbered:
            numbered[match[1]].append((int(match[2]), name))
    return _split(tree, wnids, ((name, wnid) for wnid in wnids for _, name in sorted(numbered[wnid])), "training")


def validation_split(tree: Tree, wnids: list[str]) -> Split:
    """The official validation images of these classes, in the order of val_annotations.txt."""
    lines = [line.split("\t") for line in _text(tree, "val/val_annotations.txt").splitlines() if line.strip()]
    if not all(len(line) > 1 for line in lines):
        _unfit(tree, "val/val_annotations.txt has a line without a tab between file and class")
    known = set(wnids)
    pairs = ((f"val/images/{line[0]}", line[1]) for line in lines if line[1] in known)
    return _split(tree, wnids, pairs, "validation")


def _split(tree: Tree, wnids: list[str], pairs: Iterable[tuple[str, str]], kind: str) -> Split:
    files_and_wnids = list(pairs)
    there = set(tree.names)
    for name, _ in files_and_wnids:
        if name not in there:
            _unfit(tree, f"{name} is missing")
    present = {wnid for _, wnid in files_and_wnids}
    for wnid in wnids:
        if wnid not in present:
            _unfit(tree, f"class {wnid} of wnids.txt has no {kind} images")
    index = {wnid: i for i, wnid in enumerate(wnids)}
    labels = np.array([index[wnid] for _, wnid in files_and_wnids], np.int64)
    return Split(tree.inside([name for name, _ in files_and_wnids]), labels)


def _text(tree: Tree, name: str) -> str:
    return tree.text(name) if name in tree.names else _unfit(tree, f"{name} is missing")


def _unfit(tree: Tree, what: str) -> NoReturn:
    raise HoldfastError(
        f"{tree.where} is not a complete TinyImageNet: {what}; download {TOP}.zip again or correct data.path"
    )
