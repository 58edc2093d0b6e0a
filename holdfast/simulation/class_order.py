"""The order in which classes arrive: natural, icarl, seed1993, random:<seed>, or a list."""

from collections.abc import Sequence

import numpy as np

from holdfast.errors import HoldfastError, nearest
from holdfast.seeding import generator, shuffled

# The order of iCaRL's CIFAR-100 experiments, which later work copied (docs/departures.md, Class orders; D17).
ICARL = [
    87, 0, 52, 58, 44, 91, 68, 97, 51, 15, 94, 92, 10, 72, 49, 78, 61, 14, 8, 86, 84, 96, 18, 24, 32, 45, 88, 11, 4, 67,
    69, 66, 77, 47, 79, 93, 29, 50, 57, 83, 17, 81, 41, 12, 37, 59, 25, 20, 80, 73, 1, 28, 6, 46, 62, 82, 53, 9, 31, 75,
    38, 63, 33, 74, 27, 22, 36, 3, 16, 21, 60, 19, 70, 90, 89, 43, 5, 42, 65, 76, 40, 30, 23, 85, 2, 95, 56, 48, 71, 64,
    98, 13, 99, 7, 34, 55, 54, 26, 35, 39,
]  # fmt: skip


def class_order(order: str | Sequence[int] | Sequence[str], names: Sequence[str]) -> list[int]:
    """The indices of all classes in the order of their arrival."""
    count = len(names)
    if not isinstance(order, str):
        return _listed(order, names)
    if order == "natural":
        return list(range(count))
    if order == "icarl":
        if count != len(ICARL):
            raise HoldfastError(
                f"plan.order=icarl is a list of 100 classes, but there are {count}; use seed1993 or random:<seed>"
            )
        return list(ICARL)
    if order == "seed1993":
        # A separate instance of the legacy generator, because its stream defines this order.
        return [int(c) for c in np.random.RandomState(1993).permutation(count)]
    kind, _, seed = order.partition(":")
    if kind == "random" and seed.isdecimal() and len(seed) < 20:
        return shuffled(generator(int(seed), "class order"), range(count))
    raise HoldfastError(
        f"unknown class order plan.order={order!r}; {nearest(kind, ['natural', 'icarl', 'seed1993', 'random:<seed>'])}"
    )


def _listed(order: Sequence[int] | Sequence[str], names: Sequence[str]) -> list[int]:
    index = {name: i for i, name in enumerate(names)}
    chosen = []
    for entry in order:
        known = index.get(entry) if isinstance(entry, str) else entry if 0 <= entry < len(names) else None
        if known is None:
            raise HoldfastError(f"plan.order names the class {entry!r}, which the data set does not have")
        chosen.append(known)
    if len(set(chosen)) < len(chosen):
        twice = next(c for c in chosen if chosen.count(c) > 1)
        raise HoldfastError(f"plan.order names the class {names[twice]!r} more than once")
    if len(chosen) < len(names):
        raise HoldfastError(f"plan.order lists {len(chosen)} of {len(names)} classes; it must name them all")
    return chosen
