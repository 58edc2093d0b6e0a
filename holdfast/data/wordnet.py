"""Readable names for classes that are named by WordNet ids, such as n01443537."""

from collections import Counter
from collections.abc import Sequence


def class_names(wnids: Sequence[str], text: str) -> tuple[str, ...]:
    """The first phrase for each class in `text`, whose lines are an id and phrases. Classes with the same phrase get
    their id added; a class without a phrase is named by its id."""
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    phrases = {line[0]: line[1].partition(",")[0].strip() for line in lines if len(line) == 2}
    names = [phrases.get(wnid) or wnid for wnid in wnids]
    count = Counter(names)
    return tuple(name if count[name] == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True))
