"""How the global server reaches its clients: a simulation answers for all of them, a deployment sends messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from holdfast.protocol.messages import (
    Announcement,
    Broadcast,
    Failure,
    Job,
    PrototypeShare,
    Reply,
    RoundClosed,
    TaskEnded,
    Teachers,
)

NOBODY = np.zeros(0, dtype=np.int64)


@dataclass
class Opened:
    """What comes of the first message of a round. Of sites that are told with their jobs it is known once they have
    answered."""

    announcements: Sequence[Announcement] = ()  # in the order of the clients; equal ones may be told once
    announced_bytes: int = 0  # of all of them
    observed: int = 0  # clients that looked at their images
    alarmed: np.ndarray = field(default_factory=lambda: NOBODY)  # clients whose detector raised an alarm, ascending


Answers = list[tuple[int, Reply | Failure]]  # by whom; in any order, and some may be missing or there twice
Shares = list[tuple[int, PrototypeShare]]  # by whom, which the proxy knows until it has checked them


class Clients(Protocol):
    """All clients of a federation, as its round loop sees them."""

    def announce(self, class_list: Broadcast) -> tuple[Sequence[Announcement], int]:
        """What clients announce when they get the class list without a model, and the bytes of all of it. A server that
        knows no class sends it, before the first message of the round."""
        ...

    def open_round(self, broadcast: Broadcast, selected: Sequence[int], observers: np.ndarray) -> Opened:
        """The first message of a round, to every present client. Observers get the model: the selected ones as part of
        their first job, others as this broadcast. All others get the broadcast without its model."""
        ...

    def collect_extras(self, job: Job, teachers: Teachers, selected: Sequence[int]) -> Answers:
        """The answers of these clients in the phase "begin" or "finish"."""
        ...

    def train(
        self, job: Job, teachers: Teachers, selected: Sequence[int], done: Callable[[], None]
    ) -> tuple[Answers, Shares]:
        """The answers of these clients, and what they share with the proxy; `done` is called per client."""
        ...

    def end_task(self, message: TaskEnded) -> None:
        """A task is over: clients put what they have learned into their memories."""
        ...

    def close_round(self, message: RoundClosed, selected: Sequence[int]) -> None:
        """The round is over for everybody."""
        ...
