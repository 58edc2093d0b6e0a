"""Who computes the clients' work. Every engine gives the same bits."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from holdfast.federation.client import ClientWork, Outcome
from holdfast.federation.messages import Inbox, State


class Engine(Protocol):
    """Runs `work` on pairs of states and inboxes and yields the outcomes in their order."""

    def map(self, work: ClientWork, states: Sequence[State], inboxes: Iterable[Inbox]) -> Iterator[Outcome]: ...

    def __enter__(self) -> "Engine": ...

    def __exit__(self, *_: object) -> None: ...
