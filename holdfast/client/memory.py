"""The exemplar memory: which images a client keeps of the classes it has learned, by class name."""

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.protocol.state import Holdings

Ranking = Callable[[str, Tensor, int], Tensor]  # class, images, how many -> the best of them, best first


def quota(size: int, classes: int) -> int:
    """Exemplars per class when `classes` share a memory of `size` images."""
    return size // classes if classes else 0


def candidates(memory: Holdings, data: Holdings) -> dict[str, Tensor]:
    """The images among which exemplars of each class in `data` are chosen: all of them, then older exemplars of the
    class that are not among them."""
    found = {}
    for name, ids in data.items():
        older = memory[name].long() if name in memory else ids[:0]
        found[name] = torch.cat([ids, older[~torch.isin(older, ids)]])
    return found


def update_memory(memory: Holdings, data: Holdings, size: int, best: Ranking) -> dict[str, Tensor]:
    """The memory after the classes in `data` have gone into it: every class has the same quota, and lists that are too
    long lose their last exemplars."""
    depth = quota(size, len({*memory, *data}))
    chosen = {name: best(name, ids, depth).int() for name, ids in candidates(memory, data).items()}
    return truncated({**memory, **chosen}, size)


def truncated(memory: Holdings, size: int) -> dict[str, Tensor]:
    """Every class's best exemplars, as many as its quota allows."""
    depth = quota(size, len(memory))
    return {name: ids[:depth] for name, ids in memory.items()}
