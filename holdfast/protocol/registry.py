"""The registry: which class names the federation knows, at which head position, and in which growth each came."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from holdfast.protocol.codec import Facts


@dataclass(frozen=True)
class Registry:
    """Class names in head order, and how many of them each growth brought."""

    names: tuple[str, ...] = ()
    growths: tuple[int, ...] = ()

    @cached_property
    def position(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def growth_of(self) -> Tensor:
        """The growth of each head position (C,): the "task" of a class in every loss."""
        return torch.repeat_interleave(torch.arange(len(self.growths)), torch.tensor(self.growths, dtype=torch.int64))

    def unknown(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of `names` that are not in the registry, each once, in their order."""
        return tuple(dict.fromkeys(name for name in names if name not in self.position))

    def grown(self, names: tuple[str, ...]) -> "Registry":
        """The registry after a growth by these new names."""
        return Registry((*self.names, *names), (*self.growths, len(names)))

    def positions(self, classes: Sequence[str]) -> Tensor:
        """The head position of each of these classes (K,); -1 where the registry does not know it."""
        return torch.tensor([self.position.get(name, -1) for name in classes], dtype=torch.int64)

    def to_facts(self) -> dict[str, Any]:
        return {"names": self.names, "growths": self.growths}

    @staticmethod
    def from_facts(facts: Facts) -> "Registry":
        names, growths = facts.names("names"), facts.growths()
        if sum(growths) != len(names):
            raise facts.wrong("growths")
        return Registry(names, growths)
