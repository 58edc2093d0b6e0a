"""Who computes the clients' work. Every engine gives the same bits."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from holdfast.federation.client import ClientWork
from holdfast.federation.messages import Job, Reply, State


class Engine(Protocol):
    """Runs `work` on pairs of states and jobs and yields the outcomes in their order."""

    def map(self, work: ClientWork, states: Sequence[State], jobs: Iterable[Job]) -> Iterator[tuple[State, Reply]]: ...
