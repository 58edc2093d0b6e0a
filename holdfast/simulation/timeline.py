"""When each client's data changes: the arrivals of one client, and those of all clients as arrays, so that a round is
as cheap with a hundred thousand clients as with thirty."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Arrival:
    """From `round_index` on, this is all of a client's current data."""

    round_index: int
    classes: tuple[int, ...]  # empty: the old data is gone and nothing new has come
    images: tuple[int, ...] | None = None  # None: every training image of these classes
    new: tuple[int, ...] | None = None  # the classes that the client did not have just before; None: all of them

    @property
    def brought(self) -> tuple[int, ...]:
        """The classes that come to the client with it; the others were its data before."""
        return self.classes if self.new is None else self.new


class Timeline:
    """All arrivals, client by client. Clients that get the same images in the same round have arrivals of the same
    kind: what is computed for a kind is computed once for all of them."""

    def __init__(self, arrivals: Sequence[Sequence[Arrival]]) -> None:
        known: dict[Arrival, int] = {}
        self.kind = np.array([known.setdefault(a, len(known)) for mine in arrivals for a in mine], dtype=np.int32)
        self.kinds = tuple(known)
        counts = np.array([len(mine) for mine in arrivals], dtype=np.int64)
        self.first = np.cumsum(counts) - counts  # where each client's arrivals begin
        self.client = np.repeat(np.arange(len(counts)), counts)  # the client of each arrival
        self.round = np.array([kind.round_index for kind in self.kinds], dtype=np.int64)[self.kind]
        self.brings = np.array([bool(kind.brought) for kind in self.kinds])[self.kind]  # does it bring any class?
        self._brought = np.concatenate([[0], np.cumsum(self.brings)])

    @property
    def clients(self) -> int:
        return len(self.first)

    def current(self, round_index: int) -> np.ndarray:
        """Which of its arrivals is each client's data in this round; -1 before it joins."""
        indices: np.ndarray = np.add.reduceat(self.round <= round_index, self.first, dtype=np.int64) - 1
        return indices

    def arriving(self, round_index: int) -> np.ndarray:
        """The arrivals of this round, in client order."""
        return np.flatnonzero(self.round == round_index)

    def waiting(self, clients: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """For each of these clients: does any of its arrivals from index `start` to before `end` bring classes?"""
        first = self.first[clients]
        some: np.ndarray = self._brought[first + end] > self._brought[first + start]
        return some

    @cached_property
    def returning(self) -> np.ndarray:
        """Does an arrival bring images of a class that its client has had before?"""
        again = np.zeros(len(self.kind), dtype=bool)
        had: set[int] = set()
        for i, (client, kind) in enumerate(zip(self.client.tolist(), self.kind.tolist(), strict=True)):
            if i == self.first[client]:
                had = set()
            classes = self.kinds[kind].classes
            again[i] = not had.isdisjoint(classes)
            had.update(classes)
        return again
