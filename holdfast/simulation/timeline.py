"""Whose data changes when: one client's arrivals, and those of all clients as arrays, so that a round costs the same
with thirty clients and with a hundred thousand."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Arrival:
    """From `round` on, a client's current data is this and nothing else."""

    round: int
    classes: tuple[int, ...]  # none: the old data is gone and nothing has come
    images: tuple[int, ...] | None = None  # None: every training image of these classes


class Timeline:
    """All arrivals, client after client. Clients that get the same images in the same round have an arrival of the same
    kind: what is computed for a kind is computed for all of them."""

    def __init__(self, arrivals: Sequence[Sequence[Arrival]], bounds: Sequence[int]) -> None:
        """`bounds` are the first rounds of all tasks, and the number of rounds."""
        known: dict[Arrival, int] = {}
        self.kind = np.array([known.setdefault(a, len(known)) for mine in arrivals for a in mine], dtype=np.int32)
        self.kinds = tuple(known)
        counts = np.array([len(mine) for mine in arrivals], dtype=np.int64)
        self.first = np.cumsum(counts) - counts  # where each client's arrivals begin
        self.client = np.repeat(np.arange(len(counts)), counts)  # whose each arrival is
        self.round = np.array([kind.round for kind in self.kinds], dtype=np.int64)[self.kind]
        self.brings = np.array([bool(kind.classes) for kind in self.kinds])[self.kind]  # has it any class?
        self._brought = np.concatenate([[0], np.cumsum(self.brings)])
        self._bounds = np.array(bounds)

    @property
    def clients(self) -> int:
        return len(self.first)

    def current(self, number: int) -> np.ndarray:
        """Which of its arrivals is each client's data in this round; -1 before it joins."""
        indices: np.ndarray = np.add.reduceat(self.round <= number, self.first, dtype=np.int64) - 1
        return indices

    def arriving(self, number: int) -> np.ndarray:
        """The arrivals of this round, in client order."""
        return np.flatnonzero(self.round == number)

    def waiting(self, clients: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Do any of these clients' arrivals from number `start` to before `end` bring classes?"""
        first = self.first[clients]
        some: np.ndarray = self._brought[first + end] > self._brought[first + start]
        return some

    @cached_property
    def event(self) -> np.ndarray:
        """When each arrival is put into memory: before round r (2r), because other data comes then, or after it
        (2r + 1), because the task is over."""
        task_end = self._bounds[np.searchsorted(self._bounds, self.round, side="right")] - 1
        followed = np.append(self.client[1:] == self.client[:-1], False)
        change = np.where(followed, 2 * np.append(self.round[1:], 0), np.iinfo(np.int64).max)
        when: np.ndarray = np.minimum(2 * task_end + 1, change)
        return when

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
