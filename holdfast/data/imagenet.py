"""ImageNet (ILSVRC 2012): class folders for training; validation in class folders, or flat with a mapping file."""

import re
from pathlib import Path, PurePosixPath
from typing import NoReturn

import numpy as np

from holdfast.data.cache import Entry
from holdfast.data.decoded import Split, decoded
from holdfast.data.matlab import read_mat
from holdfast.data.tree import Tree, class_folders, is_image, open_tree
from holdfast.data.wordnet import class_names
from holdfast.errors import HoldfastError

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

PATTERNS = ("imagenet", "ILSVRC2012", "ILSVRC", "imagenet.zip")
TRAIN_IMAGE = re.compile(r"(.*?)train/(n\d{8})/[^/]+")
WNID = re.compile(r"n\d{8}")
WORDS = ("LOC_synset_mapping.txt", "synset_words.txt", "words.txt")
# Names of mapping files: the contest's own (numbers, with meta.mat), Kaggle's, TensorFlow's and others'.
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
MAPPINGS = (
    "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
    "val_annotations.txt",
    "val_map.txt",
    "val.txt",
    "synset_labels.txt",
    GROUND_TRUTH,
)


def load(source: Path, size: int, cache: Path) -> tuple[tuple[str, ...], Entry]:
    """Class names, and the decoded training and validation images."""
    with open_tree(source) as tree:
        images = filter(is_image, tree.names)
        top = next((match[1] for match in map(TRAIN_IMAGE.fullmatch, images) if match), None)
        if top is None:
            _unfit(tree, "it has no train/<class>/ folders such as train/n01440764/")
        train = {name: files for name, files in class_folders(tree, f"{top}train/").items() if WNID.fullmatch(name)}
        wnids = list(train)
        test = _validation(tree, top, wnids)
        names = class_names(wnids, next((tree.text(name) for word in WORDS for name in _called(tree, word)), ""))
        splits = {"train": _split(tree, train), "test": _split(tree, test)}
        key = {"name": "imagenet", "identity": tree.identity(splits)}
        return names, decoded(cache, key, tree.place, splits, size, "ImageNet")


def _split(tree: Tree, classes: dict[str, list[str]]) -> Split:
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in classes.values()])
    return Split(tree.inside([name for files in classes.values() for name in files]), labels)


def _validation(tree: Tree, top: str, wnids: list[str]) -> dict[str, list[str]]:
    """The validation images of each class, by name."""
    below = f"{top}val/"
    files = [name for name in tree.names if name.startswith(below) and is_image(name)]
    flat = all("/" not in name.removeprefix(below) for name in files)
    classes: dict[str, list[str]] = {wnid: [] for wnid in wnids}
    if not files:
        _unfit(tree, f"it has no validation images in {below}")
    pairs = _mapped(tree, files) if flat else {name: name.removeprefix(below).split("/")[0] for name in files}
    for name, wnid in pairs.items():
        if wnid not in classes:
            _unfit(tree, f"{name} is of class {wnid}, which has no training images")
        classes[wnid].append(name)
    for wnid, found in classes.items():
        if not found:
            _unfit(tree, f"class {wnid} has no validation images")
    return classes


def _mapped(tree: Tree, files: list[str]) -> dict[str, str]:
    """The class of each validation image, from the mapping file."""
    mapping = next((name for one in MAPPINGS for name in _called(tree, one)), None)
    if mapping is None:
        _unfit(tree, f"its validation images lie flat and no file gives their classes (one of {', '.join(MAPPINGS)})")
    lines = [line for line in tree.text(mapping).splitlines() if line.strip()]
    if mapping.endswith(GROUND_TRUTH):
        numbered = _numbered(tree)
        lines = [numbered.get(line.strip(), "") for line in lines]
    found = [(line, match) for line in lines if (match := WNID.search(line))]  # a header line has none
    stems = {PurePosixPath(name).stem: name for name in files}
    named = {stems[s]: m[0] for line, m in found for s in re.split(r"[\s,./]+", line[: m.start()]) if s in stems}
    if not named and len(found) == len(files):  # one class per line, in the order of the images' names
        named = {name: match[0] for name, (_, match) in zip(files, found, strict=True)}
    for name in files:
        if name not in named:
            _unfit(tree, f"{mapping} does not give the class of {name}")
    return {name: named[name] for name in files}


def _numbered(tree: Tree) -> dict[str, str]:
    """The contest's own number of each class, from meta.mat."""
    name = next(iter(_called(tree, "meta.mat")), None)
    if name is None:
        _unfit(tree, f"{GROUND_TRUTH} has numbers, but meta.mat, which explains them, is missing")
    try:
        synsets = read_mat(tree.read(name))["synsets"]
        return {str(int(one["ILSVRC2012_ID"][0])): str(one["WNID"]) for one in synsets}
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise HoldfastError(
            f"{name} in {tree.where} cannot be read ({error}); download the development kit again"
        ) from error


def _called(tree: Tree, name: str) -> list[str]:
    return [n for n in tree.names if n == name or n.endswith(f"/{name}")]


def _unfit(tree: Tree, what: str) -> NoReturn:
    raise HoldfastError(f"{tree.where} is not a complete ImageNet: {what}; correct data.path or add what is missing")
