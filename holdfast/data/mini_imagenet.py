"""MiniImageNet: 100 class folders of 600 images, the three folders of few-shot learning, or lists of images."""

import csv
from pathlib import Path

import numpy as np

from holdfast.data.cache import Entry
from holdfast.data.decoded import Split, decoded
from holdfast.data.tree import Tree, class_folders, open_tree
from holdfast.errors import HoldfastError

MEAN = (0.473, 0.450, 0.403)
STD = (0.280, 0.271, 0.285)

PATTERNS = ("mini-imagenet", "mini-imagenet.zip", "miniImageNet", "miniImageNet.zip", "mini_imagenet", "miniimagenet")
PARTS = ("train", "val", "test")  # of few-shot learning: different classes, not different images
TRAIN, ALL = 500, 600  # images per class


def load(source: Path, size: int, cache: Path) -> tuple[tuple[str, ...], Entry]:
    """Class names, and the decoded images; the first five sixths of each class by name (500 of 600) are to train on."""
    with open_tree(source) as tree:
        classes = _classes(tree)
        files: dict[str, list[str]] = {"train": [], "test": []}
        labels: dict[str, list[int]] = {"train": [], "test": []}
        for label, (name, images) in enumerate(classes.items()):
            if len(images) < 2:
                raise HoldfastError(f"the class {name!r} of {source} has one image; add more, to train and to test")
            cut = min(max(1, len(images) * TRAIN // ALL), len(images) - 1)
            for split, part in (("train", images[:cut]), ("test", images[cut:])):
                files[split] += part
                labels[split] += [label] * len(part)
        splits = {split: Split(tree.inside(files[split]), np.array(labels[split], np.int64)) for split in files}
        key = {"name": "mini-imagenet", "identity": tree.identity(splits)}
        return tuple(classes), decoded(cache, key, tree.place, splits, size, "MiniImageNet")


def _classes(tree: Tree) -> dict[str, list[str]]:
    first = {name.split("/")[0] for name in (*tree.names, *tree.folders) if "/" in name}
    if not first:
        raise HoldfastError(f"{tree.where} has no class folders; set data.path to the folder that holds them")
    listed = [f"{part}.csv" for part in PARTS if f"{part}.csv" in tree.names]
    if listed and first == {"images"}:
        return _listed(tree, listed)
    if not first <= set(PARTS):
        return class_folders(tree)
    merged: dict[str, list[str]] = {}
    for part in sorted(first):
        for name, files in class_folders(tree, f"{part}/").items():
            if name in merged:
                raise HoldfastError(f"the class {name!r} of {tree.where} is in two of {', '.join(sorted(first))}")
            merged[name] = files
    return dict(sorted(merged.items()))


def _listed(tree: Tree, files: list[str]) -> dict[str, list[str]]:
    """The form with all images in one folder, and CSV files that list image names and classes."""
    there, seen, classes = set(tree.names), set[str](), dict[str, list[str]]()
    for file in files:
        for row in _rows(tree, file):
            name, label = f"images/{row['filename']}", row["label"]
            if not label or name not in there:
                raise HoldfastError(f"{file} in {tree.where} names {name!r}, which is not there, or gives no class")
            if name in seen:
                raise HoldfastError(f"{file} in {tree.where} names {name!r} a second time; keep only one of the lines")
            seen.add(name)
            classes.setdefault(label, []).append(name)
    if not classes:
        raise HoldfastError(f"{', '.join(files)} in {tree.where} name no images; download them again")
    return {label: sorted(names) for label, names in sorted(classes.items())}


def _rows(tree: Tree, file: str) -> list[dict[str, str]]:
    try:
        rows = csv.DictReader(tree.text(file).splitlines())
        if {"filename", "label"} <= set(rows.fieldnames or ()):
            return list(rows)
    except csv.Error as error:
        raise HoldfastError(f"{file} in {tree.where} is not CSV ({error}); download it again") from error
    raise HoldfastError(f"{file} in {tree.where} does not begin with the line filename,label; add it")
