"""Who computes the clients' work. Every engine gives the same bits."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from holdfast.client.training import ClientWork, Outcome
from holdfast.models.passes import Question
from holdfast.protocol.messages import Inbox, State


class Engine(Protocol):
    """Who does the arithmetic of a round."""

    def map(self, work: ClientWork, states: Sequence[State], inboxes: Iterable[Inbox]) -> Iterator[Outcome]:
        """Runs `work` on pairs of states and inboxes and yields the outcomes in their order."""
        ...

    def ask(self, work: ClientWork, question: Question, rows: Tensor) -> Tensor:
        """The answers about these images, asked in fixed chunks."""
        ...

    def __enter__(self) -> "Engine": ...

    def __exit__(self, *_: object) -> None: ...
