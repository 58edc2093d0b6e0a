"""A federation that is under way: no plan made beforehand, but who takes part now, and when a task ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.methods.base import Method
from holdfast.protocol.enrolment import Enrolment
from holdfast.proxy.selectors import TeacherSelector
from holdfast.seeding import draw, generator
from holdfast.server.collection import Quorum
from holdfast.server.server import Server

NEVER = 2**31


@dataclass
class LivePlan:
    """The `Schedule` of a real federation. Its tasks are the growths of the head; a task ends when the rounds of its
    learning-rate schedule are over, or with the federation's last round."""

    server: Server
    rounds_per_task: int
    total: int  # rounds; 0: no end
    seed: int
    most: int  # sites that are selected in a round
    selected: list[tuple[int, ...]] = field(default_factory=list)
    joined: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    growths: Sequence[tuple[int, Sequence[int]]] = ()

    def open(self, round_index: int, ready: Sequence[int]) -> None:
        """A round begins with these sites."""
        self.selected += [()] * (round_index - len(self.selected))
        rng = generator(self.seed, "plan", "selected", round_index)
        self.selected[round_index:] = [tuple(draw(rng, sorted(ready), min(self.most, len(ready))))]
        size = max([len(self.joined), *(number + 1 for number in ready)])
        joined = np.full(size, NEVER, dtype=np.int64)
        joined[: len(self.joined)] = self.joined
        new = [number for number in ready if joined[number] == NEVER]
        joined[new] = round_index
        self.joined = joined

    @property
    def cycle(self) -> int:
        """The rounds that a growth is trained for. Its classes have come one round before, the first ones at once."""
        return max(1, self.rounds_per_task - (self.server.last_growth > 0))

    def ends_task(self, round_index: int) -> bool:
        if not self.server.registry.growths:
            return False
        return round_index - self.server.last_growth + 1 == self.cycle or round_index + 1 == self.total

    def over(self, done: int) -> bool:
        """Is there nothing left to do after these many rounds, until a class is announced?"""
        return (
            bool(self.server.registry.growths)
            and not self.server.announced
            and done - self.server.last_growth >= self.cycle
        )

    def task_of_round(self, round_index: int) -> int:
        return max(0, len(self.server.registry.growths) - 1)

    def rounds_of(self, task: int) -> range:
        return range(1)  # an announced growth has a learning rate of its own


@dataclass
class LiveFederation:
    """The server's side of it."""

    plan: LivePlan
    method: Method
    enrolment: Enrolment
    server: Server
    selector: TeacherSelector
    quorum: Quorum
    growth: str = "announce"
    observe: str = "selected"
    detects: bool = False  # detectors look at the models of jobs
    classes: Sequence[str] = ()
    faults: None = None
