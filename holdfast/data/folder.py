"""Anyone's images: train/<class>/... and test/<class>/..., or <class>/... alone, or clients/<client>/<class>/...

In the last, federated form a file `arrivals.toml` may say in which round which classes reach which client:

    rounds = 24             # in total; default: plan.rounds after the last new class

    [[arrival]]
    round = 1               # rounds are counted from 1
    client = "north"
    classes = ["cat", "dog"]

From that round on the client's data has these classes too. `leaves = ["cat"]` in an arrival takes classes away: of
their images the client keeps only the exemplars in its memory. An arrival has classes, leaves, or both.
A task begins in every round that brings a class that no client has had before. Run it with plan.growth=announce, so
that the clients announce new classes. Without arrivals.toml the classes come in tasks, as set by plan.tasks and
plan.rounds.

A zip file of such a folder works as well."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.data.cache import Entry
from holdfast.data.decoded import Split, decoded
from holdfast.data.images import Stream
from holdfast.data.tree import Tree, class_folders, is_image, open_tree, readable
from holdfast.errors import HoldfastError, nearest
from holdfast.files import parse_toml
from holdfast.seeding import generator, shuffled

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
ARRIVALS = "arrivals.toml"
MOST = 1_000_000  # rounds

Classes = dict[str, list[str]]  # the files of each class


@dataclass(frozen=True)
class Folder:
    """What a folder of images holds."""

    names: tuple[str, ...]
    entry: Entry
    clients: tuple[str, ...] = ()
    owners: np.ndarray | None = None  # of each training image, index into clients
    stream: Stream | None = None


def load(source: Path, size: int, cache: Path, test_share: float, seed: int) -> Folder:
    """The decoded images. Without a test folder, a random `test_share` of each class's images is taken, by `seed`."""
    with open_tree(source) as tree:
        first = {name.split("/")[0] for name in (*tree.names, *tree.folders) if "/" in name or name in tree.folders}
        _all_used(tree, first)
        clients: dict[str, Classes] = {}
        if "clients" in first:
            for name in _client_names(tree):
                if readable(name) in clients:
                    raise HoldfastError(f"{source} has two folders of the client {readable(name)!r}; rename one")
                clients[readable(name)] = class_folders(tree, f"clients/{name}/")
            train = _together(clients)
        elif "train" in first:
            train = class_folders(tree, "train/")
        else:
            train = class_folders(tree)
        if not train:
            raise HoldfastError(f"{source} has no class folders with images; see 'holdfast data info folder'")
        aside = next((part for part in ("test", "val") if part in first and first & {"train", "clients"}), None)
        test = class_folders(tree, f"{aside}/") if aside else _drawn(source, train, clients, test_share, seed)
        if not aside:
            gone = {name for files in test.values() for name in files}
            train = {name: [file for file in files if file not in gone] for name, files in train.items()}
        _same_classes(source, train, test)
        names = tuple(train)
        splits = {"train": _split(tree, names, train), "test": _split(tree, names, test)}
        stream = _stream(tree, clients) if ARRIVALS in tree.names else None
        key = {"name": "folder", "identity": tree.identity(splits)}
        entry = decoded(cache, key, tree.place, splits, size, source.name)
        owner = {file: i for i, mine in enumerate(clients.values()) for files in mine.values() for file in files}
        owners = np.array([owner[file] for name in names for file in train[name]], np.int64) if clients else None
        return Folder(names, entry, tuple(clients), owners, stream)


def _all_used(tree: Tree, first: set[str]) -> None:
    """Raises an error for images beside train/ or clients/, which would be ignored; a class may be called "train"."""
    whole = next((part for part in ("clients", "train") if part in first), None)
    used = {whole, "test", "val"} if whole else first
    idle = sorted({name.split("/")[0] for name in tree.names if "/" in name and is_image(name)} - used)
    if idle:
        raise HoldfastError(
            f"{tree.where} has the folder {whole}/, and beside it {', '.join(idle[:5])}, which would not be used; "
            f"move them into {whole}/ or test/, remove them, or rename {whole}/ if it is a class"
        )


def _client_names(tree: Tree) -> list[str]:
    names = sorted({n.split("/")[1] for n in tree.folders | set(tree.names) if n.startswith("clients/") and "/" in n})
    for name in names:
        if name != name.encode("utf-8", "replace").decode():
            raise HoldfastError(f"the name of the folder clients/{name!a} in {tree.where} is not UTF-8 text; rename it")
    loose = [name for name in names if f"clients/{name}" in tree.names]
    if loose:
        raise HoldfastError(f"clients/{loose[0]} in {tree.where} is a file; clients/ holds a folder for each client")
    return names


def _together(clients: dict[str, Classes]) -> Classes:
    names = sorted({name for mine in clients.values() for name in mine})
    return {name: [file for mine in clients.values() for file in mine.get(name, [])] for name in names}


def _drawn(source: Path, train: Classes, clients: dict[str, Classes], share: float, seed: int) -> Classes:
    """Random test images of each class, or of each client's part of it, but never all of its images."""
    test: Classes = {}
    for name, files in train.items():
        parts = [mine[name] for mine in clients.values() if name in mine] or [files]
        orders = [shuffled(generator(seed, "test images", name, i), part) for i, part in enumerate(parts)]
        test[name] = sorted(f for o in orders for f in o[: min(len(o) - 1, max(1, round(share * len(o))))])
        if not test[name]:
            raise HoldfastError(
                f"the class {name!r} of {source} has too few images to draw some for testing; "
                "add images or make a folder test/<class>/"
            )
    return test


def _same_classes(source: Path, train: Classes, test: Classes) -> None:
    for name in sorted(train.keys() ^ test.keys()):
        has, lacks = ("training", "test") if name in train else ("test", "training")
        raise HoldfastError(f"the class {name!r} of {source} has {has} images but no {lacks} images; add some")


def _split(tree: Tree, names: tuple[str, ...], classes: Classes) -> Split:
    labels = np.repeat(np.arange(len(names)), [len(classes[name]) for name in names])
    return Split(tree.inside([file for name in names for file in classes[name]]), labels)


def _stream(tree: Tree, clients: dict[str, Classes]) -> Stream:
    """The content of arrivals.toml, validated."""

    def wrong(what: str) -> HoldfastError:
        return HoldfastError(f"{tree.where / ARRIVALS}: {what}")

    try:
        content = parse_toml(tree.text(ARRIVALS))
    except ValueError as error:
        raise wrong(f"this is not TOML ({error}); see 'holdfast data info folder'") from error
    if not clients:
        raise wrong(f"there is no folder clients/ beside it; arrivals need clients/<client>/<class>/ in {tree.where}")
    for key in content.keys() - {"rounds", "arrival"}:
        raise wrong(f"unknown key {key!r}; it may hold rounds and [[arrival]] tables")
    table = content.get("arrival", [])
    if not isinstance(table, list) or not table or not all(isinstance(one, dict) for one in table):
        raise wrong("it has no [[arrival]] tables; see 'holdfast data info folder'")
    order = list(clients)
    merged: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
    for place, one in enumerate(table, 1):
        client, *lists = _arrival(one, clients, f"{tree.where / ARRIVALS}: arrival {place}")
        for all_names, names in zip(
            merged.setdefault((one["round"] - 1, order.index(client)), ([], [])), lists, strict=True
        ):
            all_names += names
    arrived = {(order[client], name) for (_, client), (names, _) in merged.items() for name in names}
    for client, mine in clients.items():
        for name in mine:
            if (client, name) not in arrived:
                raise wrong(f"the class {name!r} of client {client!r} never arrives; add it or remove its folder")
    rounds = content.get("rounds")
    last = max(round_index for round_index, _ in merged) + 1
    if rounds is not None and (type(rounds) is not int or not last <= rounds <= MOST):
        raise wrong(
            f"rounds = {rounds!r}, but the last arrival is in round {last}; use {last} to {MOST:,}, or leave it out"
        )
    arrivals = sorted(
        (index, client, tuple(dict.fromkeys(names)), tuple(dict.fromkeys(leaves)))
        for (index, client), (names, leaves) in merged.items()
    )
    _check_leaving(arrivals, order, wrong)
    return Stream(tuple(arrivals), rounds)


def _check_leaving(
    arrivals: list[tuple[int, int, tuple[str, ...], tuple[str, ...]]],
    clients: list[str],
    wrong: Callable[[str], HoldfastError],
) -> None:
    """Raises an error for a class that leaves a client which does not have it, or gets it in the same round."""
    here: dict[int, set[str]] = {}
    for round_index, client, names, leaves in arrivals:
        held = here.setdefault(client, set())
        for name in leaves:
            if name in names:
                raise wrong(
                    f"the class {name!r} comes to client {clients[client]!r} and leaves it in round {round_index + 1}; "
                    "name it in classes or in leaves"
                )
            if name not in held:
                raise wrong(
                    f"the class {name!r} leaves client {clients[client]!r} in round {round_index + 1}, but it is not "
                    "among its data then; correct the round or the name"
                )
        here[client] = (held - set(leaves)) | set(names)


def _arrival(one: dict[str, Any], clients: dict[str, Classes], where: str) -> tuple[str, list[str], list[str]]:
    def wrong(what: str) -> HoldfastError:
        return HoldfastError(f"{where}: {what}")

    keys = "it has round, client, and classes or leaves"
    for key in sorted(one.keys() - {"round", "client", "classes", "leaves"}):
        raise wrong(f"unknown key {key!r}; {keys}")
    for key in ("round", "client"):
        if key not in one:
            raise wrong(f"it lacks {key!r}; {keys}")
    first, client = one["round"], one["client"]
    if not one.get("classes") and not one.get("leaves"):
        raise wrong(f"nothing comes and nothing leaves; {keys} (what a client has stays, unless leaves names it)")
    if type(first) is not int or not 1 <= first <= MOST:
        raise wrong(f"round = {first!r} should be a whole number from 1 to {MOST:,}")
    client = readable(client) if isinstance(client, str) else client
    if not isinstance(client, str) or client not in clients:
        raise wrong(f"there is no client {client!r} in clients/; {nearest(str(client), clients)}")
    lists = []
    for key in ("classes", "leaves"):
        names = one.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise wrong(f"{key} = {names!r} should be a list of names")
        lists.append([readable(name) for name in names])
        for name in lists[-1]:
            if name not in clients[client]:
                raise wrong(f"client {client!r} has no class {name!r}; {nearest(name, clients[client])}")
    return client, lists[0], lists[1]
